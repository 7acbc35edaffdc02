"""Optimizer step and training state.

Invariant: a step whose loss or gradient is not finite changes no weight and is
recorded in the state, so that the host need not check every step.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct

from specdec.models.params import cast
from specdec.training.muon import scale_by_muon
from specdec.training.objective import Objective, num_positions
from specdec.training.options import Options
from specdec.types import Array, PyTree

# Modules whose matrix is a lookup table, or a projection onto a vocabulary; of
# several of a kind, without their numbers.
_TABLES = frozenset(
  ("embed", "embed_table", "head", "heads", "relative_bias")
  + ("first", "second", "wide")  # of a block's successor
)


@struct.dataclass
class TrainState:
  """State of a run between two steps."""

  step: Array  # [] int32, number of updates
  params: PyTree  # float32
  opt_state: PyTree
  failed: Array  # [] int32, first step that was not finite; -1: none


def schedule(options: Options) -> optax.Schedule:
  """Builds the learning rate schedule: linear warmup, then cosine decay."""
  return optax.warmup_cosine_decay_schedule(
    init_value=options.learning_rate / max(1, options.warmup),
    peak_value=options.learning_rate,
    warmup_steps=options.warmup,
    decay_steps=options.steps,
    end_value=options.final_fraction * options.learning_rate,
  )


def make_optimizer(options: Options) -> optax.GradientTransformation:
  """Builds the optimizer: clipping by global norm, then AdamW or Muon."""
  rate = schedule(options)

  def decays(path, leaf):
    # The base of a convolution is a gain, which begins at 1.
    return leaf.ndim >= 2 and path[-1].key != "base"

  def optimizer_of(path, leaf):
    # Muon is for linear maps between hidden states.
    owners = (part.key.rstrip("_0123456789") for part in path[-2:-1])
    is_map = leaf.ndim == 2 and _TABLES.isdisjoint(owners)
    return "muon" if is_map else "adam"

  if options.optimizer == "muon":
    maps = optax.chain(
      scale_by_muon(0.95, jnp.dtype(options.dtype)),
      optax.add_decayed_weights(options.weight_decay),
      optax.scale_by_learning_rate(rate),
    )
    others = optax.adam(rate, b2=options.adam_b2, nesterov=True)
    update = optax.partition(
      {"muon": maps, "adam": others},
      functools.partial(jax.tree_util.tree_map_with_path, optimizer_of),
    )
  else:
    update = optax.adamw(
      rate,
      b2=options.adam_b2,
      weight_decay=options.weight_decay,
      mask=functools.partial(jax.tree_util.tree_map_with_path, decays),
    )
  return optax.chain(optax.clip_by_global_norm(options.clip), update)


def init(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
  """Returns the state before the first step."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    failed=jnp.full((), -1, jnp.int32),
  )


def shardings(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  params: PyTree,
  replicated: jax.sharding.Sharding,
) -> TrainState:
  """Returns the shardings of a state; moments are sharded like their weights.

  Args:
    state: arrays or shapes.
    params: shardings of the weights.
    replicated: sharding of everything else.
  """
  return TrainState(
    step=replicated,
    params=params,
    opt_state=optax.tree.map_params(
      optimizer,
      lambda leaf, sharding: (
        leaf if isinstance(leaf, optax.MaskedNode) else sharding
      ),
      state.opt_state,
      params,
      transform_non_params=lambda _: replicated,
      is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    ),
    failed=replicated,
  )


def make_step(
  objective: Objective,
  optimizer: optax.GradientTransformation,
  options: Options,
  state_shardings: TrainState | None = None,
):
  """Builds the jitted step(state, frozen, tokens) -> (state, measures).

  The state is donated. Tokens are [batch, T+1], or a tree with the batch as
  leading axis for objectives that need more (training/hidden.py). Measures are
  those of the objective, the loss and the gradient norm. Frozen weights that
  the objective leaves unread remain arguments: devices hold them all the same.

  Args:
    state_shardings: of the returned state; None to leave them to the compiler.
  """

  def value_and_grad(params, frozen, tokens):
    def loss_fn(params):
      params, constants = cast((params, frozen), options.dtype)
      return objective(params, constants, tokens)

    (loss, measures), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
      params
    )
    return gradient, {"loss": loss, **measures}

  def accumulated(params, frozen, tokens):
    if options.accumulate == 1:
      return value_and_grad(params, frozen, tokens)
    # Every n-th row: consecutive ones may lie on one device, and would stay.
    microbatches = jax.tree.map(
      lambda x: x.reshape(-1, options.accumulate, *x.shape[1:]).swapaxes(0, 1),
      tokens,
    )

    def add(total, microbatch):
      terms = value_and_grad(params, frozen, microbatch)
      weight = num_positions(microbatch)
      return jax.tree.map(lambda t, x: t + weight * x, total, terms), None

    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = jax.eval_shape(value_and_grad, params, frozen, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, microbatches)
    return jax.tree.map(lambda x: x / num_positions(tokens), total)

  def step(state: TrainState, frozen: PyTree, tokens: Array):
    gradient, measures = accumulated(state.params, frozen, tokens)
    norm = optax.tree.norm(gradient)
    updates, opt_state = optimizer.update(
      gradient, state.opt_state, state.params
    )
    sizes = jnp.stack([measures["loss"], norm, optax.tree.norm(updates)])
    finite = jnp.all(jnp.isfinite(sizes))
    params = optax.apply_updates(state.params, updates)
    params, opt_state = optax.tree.where(
      finite, (params, opt_state), (state.params, state.opt_state)
    )
    first = (state.failed < 0) & ~finite
    state = TrainState(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      failed=jnp.where(first, state.step + 1, state.failed),
    )
    return state, {**measures, "gradient_norm": norm}

  jit = functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
  if state_shardings is None:
    return jit(step)
  return jit(step, out_shardings=(state_shardings, None))


def make_evaluation(objective: Objective, options: Options):
  """Builds the jitted evaluation(params, frozen, tokens) -> measures."""

  @jax.jit
  def evaluation(params, frozen, tokens):
    params, frozen = cast((params, frozen), options.dtype)
    loss, measures = objective(params, frozen, tokens)
    return {"loss": loss, **measures}

  return evaluation
