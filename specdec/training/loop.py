"""One optimizer step, and the state it carries.

Invariant: a step whose loss or gradient is not finite changes no weight and is
remembered, so that the host need not look at every step to stop in time.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct

from specdec.training.objective import Objective
from specdec.training.options import Options
from specdec.types import Array, PyTree


@struct.dataclass
class TrainState:
  """What a run carries from step to step."""

  step: Array  # [] int32, updates done
  params: PyTree  # float32
  opt_state: PyTree
  failed: Array  # [] int32, the first step that was not finite; -1: none


def schedule(options: Options) -> optax.Schedule:
  """Step to learning rate."""
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0 if options.warmup else options.learning_rate,
    peak_value=options.learning_rate,
    warmup_steps=options.warmup,
    decay_steps=options.steps,
    end_value=options.final_fraction * options.learning_rate,
  )


def make_optimizer(options: Options) -> optax.GradientTransformation:
  """Clipping, then AdamW or Muon."""
  rate = schedule(options)

  def is_matrix(path, leaf):
    # The embedding is a table of rows, not a map between two spaces.
    tables = any(part.key in ("embed", "head") for part in path)
    return leaf.ndim == 2 and not tables

  if options.optimizer == "muon":
    update = optax.contrib.muon(
      rate,
      weight_decay=options.weight_decay,
      adam_b2=options.adam_b2,
      consistent_rms=0.2,  # steps as long as AdamW's: one learning rate
      muon_weight_dimension_numbers=lambda params: (
        jax.tree_util.tree_map_with_path(
          lambda path, leaf: (
            optax.contrib.MuonDimensionNumbers()
            if is_matrix(path, leaf)
            else None
          ),
          params,
        )
      ),
    )
  else:
    update = optax.adamw(
      rate,
      b2=options.adam_b2,
      weight_decay=options.weight_decay,
      mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
    )
  return optax.chain(optax.clip_by_global_norm(options.clip), update)


def init(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
  """The state before the first step."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    failed=jnp.full((), -1, jnp.int32),
  )


def shardings(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  where: PyTree,
  whole: jax.sharding.Sharding,
) -> TrainState:
  """Where a state lies: what the optimizer keeps of a weight beside it.

  Args:
    where: of the weights.
    whole: of everything else.
  """
  return TrainState(
    step=whole,
    params=where,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda leaf, own: leaf if isinstance(leaf, optax.MaskedNode) else own,
      state.opt_state,
      where,
      transform_non_params=lambda _: whole,
      is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    ),
    failed=whole,
  )


def make_step(
  objective: Objective,
  optimizer: optax.GradientTransformation,
  options: Options,
  where: TrainState | None = None,
):
  """step(state, frozen, tokens [batch, T+1]) -> (state, measures), donating.

  Where the objective knows more than tokens (training/hidden.py), `tokens` is a
  tree whose leaves have the batch first.

  Measures are those of the objective, the loss and the gradient's norm.

  Args:
    where: shardings of the state, None to leave them to what is given.
  """
  dtype = jnp.dtype(options.dtype)

  def value_and_grad(params, frozen, tokens):
    def loss(params):
      return objective(_cast(params, dtype), _cast(frozen, dtype), tokens)

    (value, measures), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return gradient, {"loss": value, **measures}

  def accumulated(params, frozen, tokens):
    if options.accumulate == 1:
      return value_and_grad(params, frozen, tokens)
    pieces = jax.tree.map(
      lambda x: x.reshape(options.accumulate, -1, *x.shape[1:]), tokens
    )

    def add(total, piece):
      return jax.tree.map(
        jnp.add, total, value_and_grad(params, frozen, piece)
      ), None

    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(value_and_grad, params, frozen, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, pieces)
    return jax.tree.map(lambda x: x / options.accumulate, total)

  def step(state: TrainState, frozen: PyTree, tokens: Array):
    gradient, measures = accumulated(state.params, frozen, tokens)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(measures["loss"]) & jnp.isfinite(norm)
    updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old),
      (params, opt_state),
      (state.params, state.opt_state),
    )
    first = (state.failed < 0) & ~finite
    state = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      failed=jnp.where(first, state.step + 1, state.failed),
    )
    return state, {**measures, "gradient_norm": norm}

  if where is None:
    return jax.jit(step, donate_argnums=0)
  return jax.jit(step, donate_argnums=0, out_shardings=(where, None))


def make_evaluation(objective: Objective, options: Options):
  """evaluation(params, frozen, tokens) -> measures of the objective, jitted."""
  dtype = jnp.dtype(options.dtype)

  @jax.jit
  def evaluation(params, frozen, tokens):
    loss, measures = objective(
      _cast(params, dtype), _cast(frozen, dtype), tokens
    )
    return {"loss": loss, **measures}

  return evaluation


def _cast(params: PyTree, dtype) -> PyTree:
  return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
