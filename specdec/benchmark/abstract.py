"""Targets and drafters of shapes alone: no weight is read or allocated.

They have costs and can be compiled ahead of time, but compute no text.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from specdec import checkpoints, decode, draft_tree, sampling
from specdec.benchmark import deployments
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import PRESET, Target, Weighted, source_of
from specdec.compiled import lowering, memory_plan
from specdec.models import attention, experts, recurrence
from specdec.roofline.chips import Chip
from specdec.roofline.cost import folds_of
from specdec.roofline.round_cost import (
  deployment_of,
  most_committed,
  round_cost,
)
from specdec.types import NO_COST, UNKNOWN_COST, Params


def target(setup: Setup, devices=None) -> Target:
  """Returns a Setup's target, its weights shapes, for a mesh of devices."""
  source = source_of(setup.target)
  config = setup.target_config()
  tokenizer = None
  if setup.has_user_drafter and not str(source).startswith(PRESET):
    with contextlib.suppress(FileNotFoundError):
      tokenizer = checkpoints.load_tokenizer(source)  # it may read it
  places = setup.places(config, devices)
  return setup.abstract_target(config, places, tokenizer)


def drafter(setup: Setup, target: Target) -> Weighted:
  """Returns the drafter of a Setup, its weights shapes; refuses a user's whose
  constructor needs weights or a tokenizer."""
  try:
    weighted = setup.make_drafter(target)
  except (AttributeError, TypeError) as error:
    if not setup.has_user_drafter:
      raise
    raise ValueError(
      f"{setup.drafter} cannot be constructed for a target without weights: "
      f"{type(error).__name__}: {error}"
    ) from error
  place = target.places and target.places.target

  def shape(x):
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    return x if abstract else lowering.replicated(x, place)

  return Weighted(weighted.drafter, jax.tree.map(shape, weighted.params))


def steps(
  setup: Setup, target: Target, drafter: Weighted
) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """Returns functions that lower lowering.STEPS of a Setup with a mesh."""
  nothing = drafter.drafter is decode.NO_DRAFTER
  rule = decode.NO_DRAFT_RULE if nothing else setup.make_rule()
  settings = sampling.settings(
    setup.batch, setup.temperature, setup.top_k, setup.top_p
  )
  return lowering.steps(
    target.model,
    drafter.drafter,
    rule,
    Params(target.checkpoint.params, drafter.params),
    lowering.inputs(
      setup.batch,
      setup.prompt_size,
      settings,
      target.places,
      encoded=target.model.encode is not None,
    ),
    setup.max_length(target.checkpoint.config),
    target.places,
  )


def plan(setup: Setup, target: Target, drafter: Weighted) -> memory_plan.Plan:
  """Estimates what each device holds."""
  draft = [checkpoint.config for checkpoint in target.drafts.values()]
  return memory_plan.plan(
    target.checkpoint.config,
    *(draft or [None]),
    batch=setup.batch,
    max_length=setup.max_length(target.checkpoint.config),
    num_nodes=drafter.drafter.spec.max_nodes,
    places=target.places,
    drafter=NO_COST if draft else drafter.drafter.cost or UNKNOWN_COST,
  )


def loops(
  setup: Setup, target: Target, drafter: Weighted, chip: Chip
) -> dict[str, float]:
  """Returns how often loops of a target's pass run, by their names.

  Attention reads the whole context. A row's slots enter the states of recurrent
  layers once in so many passes, a row at a time.
  """
  context = setup.prompt_size + setup.max_new_tokens
  counts = {attention.LOOP: -(-context // attention.BLOCK)}
  config, ways = target.checkpoint.config, target.places.target.ways
  rows = setup.batch / ways("rows")
  if config.recurrence:
    cost, spec = drafter.drafter.cost or UNKNOWN_COST, drafter.drafter.spec
    committed = most_committed(cost, spec.max_depth)
    folds = folds_of(config.recurrence.slack, spec.max_nodes, committed)
    counts[recurrence.LOOP] = rows * folds
  if config.num_experts:
    deployment = deployments.target_deployment(setup, target, chip)
    tokens = rows * drafter.drafter.spec.max_nodes
    mixture = next(x for x in deployment.shape.layers if x.num_experts)
    chosen = mixture.num_experts, mixture.per_token
    touched = deployment.experts_touched(*chosen, tokens)
    counts[experts.LOOP] = touched / ways("experts")
  return counts


def estimates(
  setup: Setup, target: Target, drafter: Weighted, chip: Chip
) -> dict[str, dict[str, float]]:
  """Returns the bytes, FLOPs and bytes sent that the cost model expects of
  draft and verify, on each chip.

  A tree that depends on data is not priced, and neither is a drafter of unknown
  cost.
  """
  cost, spec = drafter.drafter.cost or UNKNOWN_COST, drafter.drafter.spec
  where = setup.batch, setup.max_length(target.checkpoint.config)
  deployment = deployments.target_deployment(setup, target, chip)
  # Verification goes on where an early exit ends, if nodes keep their order.
  start = cost.exit_layer if spec.parents is not None else 0
  verifier = dataclasses.replace(deployment, start=start)
  nodes, committed = spec.max_nodes, most_committed(cost, spec.max_depth)
  costs = {"verify": verifier.cost(where[0], nodes, where[1], committed)}
  parents = setup.make_shape().spec.parents
  if cost.step is not None and parents is not None:
    draft = deployment_of(deployment, cost)
    if cost.shape is not None and not cost.shares_target:
      draft = deployments.on_mesh(draft, target.draft_place)
    _, *levels = draft_tree.levels(np.array(parents))
    sizes = tuple(level.stop - level.start for level in levels)
    whole = round_cost(deployment, cost, sizes, *where, draft_deployment=draft)
    drafting = whole.only("draft", "first layers")
    costs |= {"draft": drafting} if drafting.parts else {}
  sums = ("bytes", "flops", "sent")
  return {
    step: {name: getattr(one, name) for name in sums}
    for step, one in costs.items()
  }
