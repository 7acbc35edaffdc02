"""Lowers the steps of a generation from shapes alone.

For inspecting compiled code, also for chips that are not attached. Invariant:
nothing is allocated, and every leaf has the sharding of a real run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import traverse_util

from specdec import decode, sampling, sharding, step
from specdec.drafters.heads import draft_head
from specdec.drafters.heads.block_head import AnyHead
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat
from specdec.types import (
  AcceptanceRule,
  Drafter,
  Model,
  Params,
  PyTree,
  Resume,
  Source,
)

STEPS = ("prefill", "draft", "verify", "accept", "loop")


def weights(
  config: TransformerConfig,
  place: sharding.Placement | None,
  cut_groups: bool = False,
):
  """Returns a model's parameters as shapes, sharded where it has a place.

  Args:
    cut_groups: as of `params.shardings`.
  """
  shapes = traverse_util.unflatten_dict(model_params.held(config), sep="/")
  shapes = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype)),
    shapes,
    is_leaf=lambda x: isinstance(x, model_params.ParamSpec),
  )
  if place is None:
    return shapes
  shardings = model_params.shardings(config, place, cut_groups)
  return jax.tree.map(shaped, shapes, shardings)


def head_weights(
  head: AnyHead,
  target,
  place: sharding.Placement | None,
  dtype: str = "float32",
  form: WeightFormat | None = None,
) -> PyTree:
  """Returns Params.draft of a trained head as shapes.

  Args:
    target: the target's parameters, as shapes.
    place: of the head.
    dtype: of the head's weights.
    form: of its matrices, if they are integers.
  """

  def weights(key, target):
    net = draft_head.in_dtype(head.init(key), dtype)
    draft = draft_head.weights_of(head, net, target)
    return draft_head.quantize(draft, form) if form else draft

  shapes = jax.eval_shape(weights, jax.random.key(0), target)
  if place is None:
    return shapes
  return jax.tree.map(shaped, shapes, draft_head.shardings(head, shapes, place))


def replicated(tree: PyTree, place: sharding.Placement | None) -> PyTree:
  """Returns arrays or shapes as shapes of which every device has all."""
  whole = place and place.sharding(())
  return jax.tree.map(lambda x: shaped(x, whole), tree)


def shaped(x, sharding) -> jax.ShapeDtypeStruct:
  """Returns an array or a shape as a shape that lies there."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def inputs(
  batch: int,
  prompt: int,
  settings: sampling.Sampling,
  places: sharding.Places,
  encoded: bool = False,
) -> decode.Inputs:
  """Returns the inputs of a generation as sharded shapes.

  Args:
    prompt: P, tokens of the prompt buffer.
    settings: of `batch` rows.
    encoded: an encoder reads the prompt, and the output begins with one token.
  """
  row = jax.ShapeDtypeStruct((batch,), jnp.int32)
  ids = jax.ShapeDtypeStruct((batch, prompt), jnp.int32)
  source = Source(ids, row) if encoded else None
  if encoded:
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
  key, sampled = jax.eval_shape(lambda: (jax.random.key(0), settings))
  shapes = decode.Inputs(ids, row, key, sampled, row, row, source)
  return jax.tree.map(shaped, shapes, decode.input_shardings(shapes, places))


def steps(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  given: decode.Inputs,
  max_length: int,
  places: sharding.Places,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """Returns a function for each of STEPS that lowers it.

  Arguments are those of `decode.on_mesh`.
  """
  program = decode.on_mesh(
    target, drafter, rule, params, given, max_length, places
  )
  spec, state = drafter.spec, program.shapes
  rows, whole = (places.target.sharding(n) for n in (("rows",), ()))
  distribution = places.target.sharding(("rows", None, "vocab"))
  batch = state.length.shape[0]

  resumed = []  # layers that a draft resumes

  def drafting(params, state):
    draft, state = step.draft_step(target, drafter, rule, params, state)
    if draft.resume is not None:  # its KV is in the state's cache
      resumed.append(len(draft.resume.layers))
    hidden = draft.resume and draft.resume.hidden
    return draft._replace(resume=None), hidden, state

  draft, hidden, _ = jax.eval_shape(drafting, params, state)
  draft = draft._replace(
    tokens=shaped(draft.tokens, rows),
    parents=draft.parents and shaped(draft.parents, rows),
    log_probs=draft.log_probs and shaped(draft.log_probs, distribution),
    count=shaped(draft.count, rows),
  )
  hidden = hidden and shaped(hidden, rows)

  def restored(draft, hidden, state):
    if not resumed:
      return draft
    layers = state.target_cache.layers[: resumed[0]]
    return draft._replace(resume=Resume(hidden, layers))

  def verifying(params, state, draft, hidden):
    return step.verify_step(
      target, spec, params, state, restored(draft, hidden, state)
    )

  def accepting(logits, draft, state, eos_ids):
    draft = restored(draft, None, state)
    return step.accept_step(rule, spec, draft, logits, state, eos_ids)

  size = batch, spec.max_nodes, target.vocab_size
  logits = jax.ShapeDtypeStruct(size, jnp.float32, sharding=distribution)
  ends = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)
  most = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)

  def sharding_of(x) -> jax.sharding.NamedSharding:
    """Returns the sharding of a step's result other than the state."""
    if x.shape[:1] != (batch,):  # not per row
      return whole
    return distribution if x.shape[-1:] == (target.vocab_size,) else rows

  def giving_state(function, *args):
    """Lowers a step whose last result is the state, keeping its sharding."""

    def barred(*args):
      # Without it XLA may choose another layout for a cache that is an output.
      return jax.lax.optimization_barrier(function(*args))

    def lower():
      *others, _ = jax.eval_shape(function, *args)
      shardings = (*jax.tree.map(sharding_of, others), program.state)
      jit = jax.jit(barred, donate_argnums=1, out_shardings=shardings)
      return jit.lower(*args)

    return lower

  return {
    "prefill": lambda: program.start.lower(params, given),
    "draft": giving_state(drafting, params, state),
    "verify": giving_state(verifying, params.target, state, draft, hidden),
    "accept": lambda: jax.jit(accepting).lower(logits, draft, state, ends),
    "loop": lambda: program.run.lower(params, state, ends, most),
  }
