"""The real steps of a generation, lowered from shapes alone.

For looking at what a compiler makes of them, on chips that need not be there.
Invariant: nothing is allocated, and every leaf has the sharding that it would
have in a run.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_tree, programs, sampling, sharding, step
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import AcceptanceRule, Drafter, Model, Params, Resume

STEPS = ("prefill", "draft", "verify", "accept", "loop")


def weights(config: TransformerConfig, place: sharding.Placement):
  """A model's parameters as shapes, each where it would lie."""
  shapes = jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )
  return _deployment(shapes, model_params.shardings(config, place))


def _deployment(shapes, where):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    where,
  )


def inputs(
  batch: int,
  prompt: int,
  settings: sampling.Sampling,
  places: programs.Places,
) -> programs.Inputs:
  """What a generation begins with, as shapes.

  Args:
    prompt: P, of the prompt's buffer.
    settings: of `batch` rows.
  """
  row = jax.ShapeDtypeStruct((batch,), jnp.int32)
  found = programs.Inputs(
    jax.ShapeDtypeStruct((batch, prompt), jnp.int32),
    row,
    jax.eval_shape(lambda: jax.random.key(0)),
    jax.eval_shape(lambda: settings),
    row,
    row,
  )
  return _deployment(found, programs.of_inputs(found, places))


def steps(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  given: programs.Inputs,
  max_length: int,
  places: programs.Places,
) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """Name of STEPS -> what lowers it. Arguments as of `programs.on_mesh`."""
  made = programs.on_mesh(
    target, drafter, rule, params, given, max_length, places
  )
  spec, state = drafter.spec, made.shapes
  rows, whole = (places.target.sharding(n) for n in (("rows",), ()))
  distribution = places.target.sharding(("rows", None, "vocab"))
  batch = state.length.shape[0]

  def shaped(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  def drafting(params, state):
    draft, state = step.draft_step(
      drafter, params, state, target.vocab_size, rule
    )
    hidden = draft.resume and draft.resume.hidden  # KV is in the state's cache
    return draft._replace(resume=None), hidden, state

  known = []  # the tree, where it is one before it is drawn
  resumed = []  # layers that a draft resumes

  def traced(params, state):
    draft, _ = drafter.propose(
      params,
      state.draft_state,
      step.context_of(state, target.vocab_size, rule),
    )
    if draft.resume is not None:
      resumed.append(len(draft.resume.layers))
    hidden = draft.resume and draft.resume.hidden
    draft = draft._replace(resume=None)
    if spec.chain:
      draft = draft._replace(parents=draft_tree.chain(spec.max_nodes))
    if isinstance(draft.parents, np.ndarray):
      known.append(draft.parents)
      draft = draft._replace(parents=None)
    return draft, hidden

  draft, hidden = jax.eval_shape(traced, params, state)
  draft = draft._replace(
    tokens=shaped(draft.tokens, rows),
    parents=draft.parents and shaped(draft.parents, rows),
    log_probs=draft.log_probs and shaped(draft.log_probs, distribution),
    count=shaped(draft.count, rows),
  )
  hidden = hidden and shaped(hidden, rows)

  def given_back(draft, hidden, state):
    if known:
      draft = draft._replace(parents=known[0])
    if not resumed:
      return draft
    layers = state.target_cache.layers[: resumed[0]]
    return draft._replace(resume=Resume(hidden, layers))

  def verifying(params, state, draft, hidden):
    return step.verify_step(
      target, params, state, given_back(draft, hidden, state), spec
    )

  def accepting(logits, draft, state, eos_ids):
    draft = given_back(draft, None, state)
    return step.accept_step(rule, draft, logits, state, spec.max_depth, eos_ids)

  logits = jax.ShapeDtypeStruct(
    (batch, spec.max_nodes, target.vocab_size),
    jnp.float32,
    sharding=distribution,
  )
  ends = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)
  most = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)

  def lies(x) -> jax.sharding.NamedSharding:
    """Where what a step gives beside the state lies."""
    if x.shape[:1] != (batch,):  # of all rows alike
      return whole
    return distribution if x.shape[-1:] == (target.vocab_size,) else rows

  def giving_state(function, *args):
    """A step whose last result is the state, which stays where it lay."""

    def barred(*args):
      # A pinned cache that is a result by itself would leave its layout open.
      return jax.lax.optimization_barrier(function(*args))

    def lower():
      *others, _ = jax.eval_shape(function, *args)
      where = (*jax.tree.map(lies, others), made.state)
      jit = jax.jit(barred, donate_argnums=1, out_shardings=where)
      return jit.lower(*args)

    return lower

  return {
    "prefill": lambda: made.start.lower(params, given),
    "draft": giving_state(drafting, params, state),
    "verify": giving_state(verifying, params.target, state, draft, hidden),
    "accept": lambda: jax.jit(accepting).lower(logits, draft, state, ends),
    "loop": lambda: made.run.lower(params, state, ends, most),
  }
