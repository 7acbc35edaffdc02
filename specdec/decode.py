"""Prompt in, text out: prefill and all rounds as one device program.

It compiles once for a batch shape. Autoregressive decoding is the draft of one
node through the very same loop. Invariants: model, drafter and rule are handed
in; this module imports none of them. Whatever jax_enable_x64 says, numbers have
32 bits: caches, noise and texts do not depend on it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import multihost, sharding, step
from specdec.inputs import (
  Inputs,
  check_pair,
  check_shapes,
  check_source,
  check_weights,
  checked,
)
from specdec.noise import row_keys
from specdec.types import (
  NEVER,
  NO_COST,
  NO_DRAFT,
  NO_FAULT,
  PROMPT,
  AcceptanceRule,
  Array,
  DecodeState,
  Draft,
  Drafter,
  DraftSpec,
  Model,
  Outcomes,
  Params,
  PyTree,
  Sampling,
  Source,
  Stats,
)

MAX_ROUNDS = np.iinfo(np.int32).max
_PARTS = ("target", "drafter", "rule")  # static arguments of every program


def in_32_bits(function):
  """Traces a program with 32-bit numbers, whatever jax_enable_x64 says."""

  @functools.wraps(function)
  def traced(*args, **options):
    with jax.enable_x64(False):
      return function(*args, **options)

  return traced


@functools.partial(jax.jit, static_argnames=(*_PARTS, "max_length"))
@in_32_bits
def start(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  prompt: Array,
  prompt_length: Array,
  key: Array,
  *,
  max_length: int,
  sampling: Sampling,
  limit: Array | None = None,
  index: Array | None = None,
  source: Source | None = None,
) -> DecodeState:
  """Prefill: the state before the first round. Arguments as `generate`'s."""
  check_pair(drafter.spec, rule)
  kv.check_tokens(target, drafter.spec.max_nodes, "the target")
  check_source(target, source)
  check_shapes(
    Inputs(prompt, prompt_length, key, sampling, limit, index, source)
  )
  check_weights(params)
  batch, size = prompt.shape
  if size > max_length:
    raise ValueError(
      f"the prompt buffer holds {size} tokens and max_length is {max_length}; "
      "max_length must be at least as long"
    )
  spec = drafter.spec
  chunk = min(kv.CHUNK, size)
  slots = kv.num_slots(max(max_length + spec.max_nodes, size + chunk))
  length = prompt_length.astype(jnp.int32)
  limit = max_length if limit is None else limit.astype(jnp.int32)
  limit = jnp.minimum(jnp.full((batch,), max_length, jnp.int32), limit)
  index = jnp.arange(batch) if index is None else index.astype(jnp.int32)
  tokens = jnp.zeros((batch, max_length), jnp.int32)
  tokens = tokens.at[:, :size].set(prompt.astype(jnp.int32))

  def counts(*shape):
    return jnp.zeros(shape, jnp.int32)

  cache, prefill_output = kv.prefill(
    target,
    params.target,
    tokens[:, :size],
    kv.empty(target, params.target, batch, slots, source),
    length - 1,
    chunk=chunk,
    features=spec.features,
  )
  state = DecodeState(
    keys=row_keys(key, index),
    tokens=tokens,
    length=length,
    limit=limit,
    done=length >= limit,
    fault=jnp.full((batch,), NO_FAULT, jnp.int8),
    sampling=sampling,
    target_cache=cache,
    draft_state=None,
    stats=Stats(
      rounds=counts(batch),
      emitted=counts(batch),
      drafted=counts(batch, spec.max_depth),
      accepted=counts(batch, spec.max_depth),
      evaluated=counts(batch, spec.max_depth),
      whole=counts(batch),
      kept=counts(batch),
      nodes=counts(batch),
      widths=counts(len(spec.widths)),
    ),
    log_probs=jnp.zeros((batch, max_length), jnp.float32),
    draft_log_probs=jnp.full((batch, max_length), NO_DRAFT, jnp.float32),
    origin=jnp.full((batch, max_length), PROMPT, jnp.int8),
    source=source,
    outcomes=_no_outcomes(batch, spec) if spec.classes else None,
  )
  context = step.context_of(state, target.vocab_size, rule)
  return state.replace(
    draft_state=drafter.init(params, context, prefill_output)
  )


def _no_outcomes(batch: int, spec: DraftSpec) -> Outcomes:
  """What is known of draft tokens before the first round."""
  return Outcomes(
    jnp.zeros((batch, spec.max_depth, 2), jnp.float32),
    jnp.zeros((batch, spec.classes, 2), jnp.float32),
    jnp.zeros((batch,), jnp.int32),
    jnp.full((batch,), NEVER, jnp.int32),
  )


@functools.partial(jax.jit, static_argnames=_PARTS, donate_argnames=("state",))
@in_32_bits
def run(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  eos_ids: Array,
  max_rounds: Array | int = MAX_ROUNDS,
  num_done: Array | None = None,
) -> DecodeState:
  """Rounds until every row is done, or `max_rounds` of them, without the host.

  The state's buffers are given to the result (donated): use only that.

  Args:
    num_done: [] rows that are done when it may stop; default all of them.
  """
  max_rounds = jnp.asarray(max_rounds, jnp.int32)

  def unfinished(carry):
    state, n = carry
    left = ~jnp.all(state.done)
    if num_done is not None:
      left &= jnp.sum(state.done) < num_done
    return left & (n < max_rounds)

  def body(carry):
    state, n = carry
    state = step.decode_step(target, drafter, rule, params, state, eos_ids)
    return state, n + 1

  return jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def _start(parts, params: Params, inputs: Inputs, max_length: int):
  options = inputs._asdict() | {"max_length": max_length}
  return start(*parts, params, **options)


@functools.partial(jax.jit, static_argnames=(*_PARTS, "max_length"))
def _generate(target, drafter, rule, params, inputs, eos_ids, max_length):
  parts = target, drafter, rule
  return run(*parts, params, _start(parts, params, inputs, max_length), eos_ids)


class Programs(NamedTuple):
  """A generation's two programs on a mesh: jitted, with their shardings.

  start(params, inputs) -> DecodeState
  run(params, state, eos_ids, max_rounds) -> DecodeState; the state is donated
  """

  start: Callable[[Params, Inputs], DecodeState]
  run: Callable[[Params, DecodeState, Array, Array], DecodeState]
  inputs: Inputs  # of shardings
  state: DecodeState  # of shardings
  shapes: DecodeState  # of ShapeDtypeStructs, with them


def _shape(x, where=None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def input_shardings(inputs: Inputs, places: sharding.Places) -> Inputs:
  """Shardings of a generation's inputs: rows are split, the key is not."""
  rows, whole = (places.target.sharding(n) for n in (("rows",), ()))
  return jax.tree.map(lambda _: rows, inputs)._replace(key=whole)


def on_mesh(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: PyTree,
  inputs: Inputs,
  max_length: int,
  places: sharding.Places,
) -> Programs:
  """Compiles `start` and `run` with a sharding for every leaf in and out.

  Nothing in models, drafters or rules depends on the mesh but the placement
  that a model was constructed with.

  Args:
    params: arrays or shapes; their `sharding` says where each lies.
    inputs: arrays or shapes.

  Raises:
    ValueError: the rows do not divide over the mesh.
  """
  parts = target, drafter, rule

  def first(params: Params, inputs: Inputs) -> DecodeState:
    return _start(parts, params, inputs, max_length)

  def rest(params, state, eos_ids, max_rounds):
    return run(*parts, params, state, eos_ids, max_rounds)

  shapes = jax.eval_shape(first, params, inputs)
  weights = jax.tree.map(lambda x: x.sharding, params)
  given = input_shardings(inputs, places)
  state = sharding.of_state(shapes, *places)
  whole = places.target.sharding(())
  return Programs(
    jax.jit(first, in_shardings=(weights, given), out_shardings=state),
    jax.jit(
      rest,
      in_shardings=(weights, state, whole, whole),
      out_shardings=state,
      donate_argnums=1,
    ),
    given,
    state,
    jax.tree.map(_shape, shapes, state),
  )


@functools.lru_cache(maxsize=64)
def _on_mesh(parts, max_length, places, form, leaves) -> Programs:
  """`on_mesh`, cached by all that it depends on."""
  params, inputs = jax.tree.unflatten(form, leaves)
  return on_mesh(*parts, params, inputs, max_length, places)


def _programs(parts, params, inputs: Inputs, eos_ids, max_length: int, mesh):
  """Prefill () -> state and loop (state, rounds) -> state, on a mesh or not."""
  if mesh is None:
    return (
      lambda: _start(parts, params, inputs, max_length),
      lambda state, n: run(*parts, params, state, eos_ids, n),
    )
  single = isinstance(mesh, sharding.Placement)
  places = sharding.Places(mesh) if single else mesh
  devices = set(places.target.mesh.devices.flat)
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.sharding.device_set != devices:
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} does not lie on the mesh: load "
        "the checkpoint with place=, or device_put it by "
        "models.params.shardings"
      )
  shapes = (
    jax.tree.map(lambda x: _shape(x, x.sharding), params),
    jax.tree.map(_shape, inputs),
  )
  leaves, form = jax.tree.flatten(shapes)
  programs = _on_mesh(parts, max_length, places, form, tuple(leaves))
  key, whole, put = inputs.key, places.target.sharding(()), multihost.put
  rows, where = (x._replace(key=None) for x in (inputs, programs.inputs))
  inputs = jax.tree.map(put, rows, where)._replace(key=key)
  eos_ids = put(eos_ids, whole)
  return (
    lambda: programs.start(params, inputs),
    lambda state, n: programs.run(
      params, state, eos_ids, put(np.int32(n), whole)
    ),
  )


def generate(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  prompt: Array,
  prompt_length: Array,
  key: Array,
  *,
  max_length: int,
  sampling: Sampling,
  eos_ids: Sequence[int] = (),
  limit: Array | None = None,
  index: Array | None = None,
  source: Source | None = None,
  mesh: sharding.Places | sharding.Placement | None = None,
) -> DecodeState:
  """Prompt in, text out: prefill and all rounds as one compiled program.

  It compiles once for a batch shape, whatever the prompts say and however long
  each of them is.

  Args:
    params: weights of target and, where the drafter has any, of the draft.
    prompt: [B, P] int tokens, each row padded at its end with anything.
    prompt_length: [B], each in 1..P.
    key: a JAX random key; row keys are folded from it and `index`.
    max_length: L, prompt and output together, at most.
    sampling: temperature and filters a row (`sampling.settings`).
    eos_ids: any of these ends a row; it is emitted.
    limit: [B] length at which a row stops; default max_length.
    index: [B] numbers that name the rows' noise; default 0..B-1. A row's text
      depends on its index and not on its place or its neighbours.
    source: what the encoder of an encoder-decoder reads. The prompt is then
      the beginning of its output: the start token, and more if you like.
    mesh: where target and draft lie (`sharding.places`); target, drafter and
      params were constructed and loaded for it. Prefill and loop are then two
      programs. Default: one device.

  Returns:
    The last DecodeState: row b's text is tokens[b, :length[b]]. A row whose
    next distribution is not finite stops before it, and its `fault` is set.

  Raises:
    ValueError: prompt_length out of 1..P; token ids that the target does not
      have; arrays of another batch size; P > max_length; a source without an
      encoder, or an encoder without a source; a drafter whose
      siblings the rule is not right for; distributions over different
      vocabularies; rows that do not divide over the mesh, or weights that do
      not lie on it.
  """
  inputs = Inputs(prompt, prompt_length, key, sampling, limit, index, source)
  inputs, eos_ids = checked(inputs, eos_ids, max_length, target.vocab_size)
  parts = target, drafter, rule
  if mesh is None:
    return _generate(*parts, params, inputs, eos_ids, max_length)
  first, rest = _programs(parts, params, inputs, eos_ids, max_length, mesh)
  return rest(first(), MAX_ROUNDS)


def _propose_nothing(params, draft_state, context):
  del params
  count = jnp.ones_like(context.length)
  return Draft(context.pending, None, None, count), draft_state


NO_DRAFTER = Drafter(
  DraftSpec.of((-1,), name="none"),
  init=lambda *_: None,
  propose=_propose_nothing,
  update=lambda params, draft_state, *_: draft_state,
  cost=NO_COST,
)
NO_DRAFT_RULE = AcceptanceRule(
  None, None, "coupled", frozenset({"none"}), lossless=True, name="none"
)


def autoregress(target: Model, params: Params, *args, **options) -> DecodeState:
  """Autoregressive decoding: `generate` with N = 1. Arguments as there, less
  the two.

  Its noise is addressed by position, so coupled speculation with the same key
  gives the same text.
  """
  return generate(target, NO_DRAFTER, NO_DRAFT_RULE, params, *args, **options)


def stream(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  prompt: Array,
  prompt_length: Array,
  key: Array,
  *,
  max_length: int,
  sampling: Sampling,
  every: int = 4,
  eos_ids: Sequence[int] = (),
  limit: Array | None = None,
  index: Array | None = None,
  source: Source | None = None,
  mesh: sharding.Places | sharding.Placement | None = None,
) -> Iterator[DecodeState]:
  """`generate` in pieces: the state after prefill and after every few rounds.

  Each state gives its buffers to the next (they are donated): copy what you
  want to keep before asking for more. Arguments as `generate`'s.
  """
  if every < 1:
    raise ValueError(f"every = {every}; it must be >= 1")
  inputs = Inputs(prompt, prompt_length, key, sampling, limit, index, source)
  inputs, eos_ids = checked(inputs, eos_ids, max_length, target.vocab_size)
  parts = target, drafter, rule
  first, rest = _programs(parts, params, inputs, eos_ids, max_length, mesh)

  def states():
    state = first()
    yield state
    while not bool(jnp.all(state.done)):
      state = rest(state, every)
      yield state

  return states()
