"""Lowers the training step of a draft head from shapes alone.

For compiling it for chips that are not attached. Invariant: nothing is read or
allocated, and every leaf has the type and the sharding of a real run.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec.benchmark.target import config_of, source_of
from specdec.compiled import lowering, memory_plan
from specdec.drafters.heads import draft_head
from specdec.models import transformer
from specdec.training import drafting, loop, placing
from specdec.training.setup import HeadSetup


class Step(NamedTuple):
  """A training step that can be compiled.

  Attributes:
    lower: lowers it.
    plan: what each device is expected to hold.
    shared_out: shapes of the target's weights of which no device has all.
  """

  lower: Callable[[], jax.stages.Lowered]
  plan: memory_plan.Plan
  shared_out: frozenset[tuple[int, ...]]


def step(
  setup: HeadSetup,
  mesh: str,
  draft_ways: int | None = None,
  devices=None,
) -> Step:
  """Returns the step of train_drafter.train with these arguments.

  Args:
    setup: its target is a checkpoint, or a preset as 'preset:llama3-8b'; its
      texts are not read, nor its cache of hidden states, and the tokens that
      are drafted are the first ones.
    devices: of the mesh; default all of JAX's.

  Raises:
    ValueError: mesh, target and head do not go together.
    FileNotFoundError: the target is not there.
  """
  options, head_config = setup.options, setup.head_config
  config = config_of(source_of(setup.target), options.dtype)
  head_config.check(config)
  where = placing.places(
    mesh, config, head_config, options, draft_ways, devices
  )
  model = transformer.model(config, where.target)
  ids = np.arange(head_config.vocabulary) if head_config.vocabulary else None
  _, head = placing.heads(head_config, config, ids, where.draft)
  optimizer = loop.make_optimizer(options)
  net = jax.eval_shape(head.init, jax.random.key(0))
  state = jax.eval_shape(functools.partial(loop.init, optimizer=optimizer), net)
  lie = loop.shardings(
    state,
    optimizer,
    draft_head.shardings(head, net, where.draft),
    where.target.sharding(()),
  )
  state = jax.tree.map(lowering.shaped, state, lie)

  def of_rows(*size: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    shape, rows = (options.batch, *size), where.target.sharding(("rows",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

  target = lowering.weights(config, where.target)
  batch = {"tokens": of_rows(options.sequence + 1)}
  if setup.cache:  # as hidden.Cached
    dtype = jax.tree.leaves(target)[0].dtype
    states = of_rows(options.sequence, config.width, dtype=dtype)
    batch |= {"last": states, "features": (states,) * len(head.features)}
  if head_config.block or head_config.parallel:  # as data.Numbered
    batch |= {"step": of_rows(), "row": of_rows()}
  objective = drafting.objective(
    head, model, setup.loss, False, options.seed, where.draft
  )
  jitted = loop.make_step(objective, optimizer, options, lie)
  return Step(
    lambda: jitted.lower(state, target, batch),
    placing.plan(head_config, config, where),
    frozenset(
      x.shape
      for x in jax.tree.leaves(target)
      if x.sharding.shard_shape(x.shape) != x.shape
    ),
  )
