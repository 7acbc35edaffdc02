"""Prompt in, text out: prefill and all rounds as one device program.

It compiles once for a batch shape. Autoregressive decoding is the draft of one
node through the very same loop. Invariants: model, drafter and rule are handed
in; this module imports none of them. Whatever jax_enable_x64 says, numbers have
32 bits: caches, noise and texts do not depend on it.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import sampling, step
from specdec.noise import row_keys
from specdec.types import (
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
  Params,
  Sampling,
  Stats,
)

MAX_ROUNDS = np.iinfo(np.int32).max
_PARTS = ("target", "drafter", "rule")  # static arguments of every program


def check_pair(spec: DraftSpec, rule: AcceptanceRule) -> None:
  """Refuses a drafter, by its spec, whose drafts a rule cannot evaluate.

  Raises:
    ValueError: says why.
  """
  if rule.chains_only and not spec.chain:
    raise ValueError(
      f"{rule.name} evaluates chains, and {spec.name} drafts trees: give it "
      "k, or shape=chain(k)"
    )
  if spec.siblings not in rule.siblings:
    why = ""
    if spec.siblings == "deterministic":
      why = (
        ", as it reads the distribution that each draft token was drawn from"
      )
    raise ValueError(
      f"siblings of {spec.name} are {spec.siblings!r}; {rule.name} is right "
      f"for {', '.join(sorted(rule.siblings))}{why}"
    )
  ascending = tuple(sorted(set(spec.widths)))
  if spec.widths != ascending or spec.widths[-1:] != (spec.max_nodes,):
    raise ValueError(
      f"widths = {spec.widths} of {spec.name}; they must ascend and end with "
      f"max_nodes = {spec.max_nodes}"
    )
  if spec.widths[0] < 1:
    raise ValueError(
      f"widths = {spec.widths} of {spec.name}; each must be at least 1"
    )
  if spec.parents is not None and DraftSpec.of(spec.parents)[:2] != spec[:2]:
    raise ValueError(
      f"parents = {spec.parents} of {spec.name} are not the tree of max_nodes "
      f"= {spec.max_nodes} and max_depth = {spec.max_depth}"
    )


def _in_32_bits(function):
  """Traces a program with 32-bit numbers, whatever jax_enable_x64 says."""

  @functools.wraps(function)
  def traced(*args, **options):
    with jax.enable_x64(False):
      return function(*args, **options)

  return traced


@functools.partial(jax.jit, static_argnames=(*_PARTS, "max_length"))
@_in_32_bits
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
) -> DecodeState:
  """Prefill: the state before the first round. Arguments as `generate`'s."""
  check_pair(drafter.spec, rule)
  _check_shapes(prompt, prompt_length, sampling, limit, index)
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.dtype.itemsize > 4:
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} is {leaf.dtype}; weights must "
        "have 32 bits or fewer: cast them"
      )
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
  limit = jnp.minimum(jnp.full((batch,), max_length), limit)
  index = jnp.arange(batch) if index is None else index.astype(jnp.int32)
  tokens = jnp.zeros((batch, max_length), jnp.int32)
  tokens = tokens.at[:, :size].set(prompt.astype(jnp.int32))
  cache, prefill_output = kv.prefill(
    target,
    params.target,
    tokens[:, :size],
    target.init_cache(batch, slots),
    length - 1,
    chunk=chunk,
    features=spec.features,
  )
  state = DecodeState(
    keys=_row_keys(key, index),
    tokens=tokens,
    length=length,
    limit=limit,
    done=length >= limit,
    fault=jnp.full((batch,), NO_FAULT, jnp.int8),
    sampling=sampling,
    target_cache=cache,
    draft_state=None,
    stats=Stats(
      rounds=jnp.zeros((batch,), jnp.int32),
      emitted=jnp.zeros((batch,), jnp.int32),
      drafted=jnp.zeros((batch, spec.max_depth), jnp.int32),
      accepted=jnp.zeros((batch, spec.max_depth), jnp.int32),
      evaluated=jnp.zeros((batch, spec.max_depth), jnp.int32),
      whole=jnp.zeros((batch,), jnp.int32),
      kept=jnp.zeros((batch,), jnp.int32),
      nodes=jnp.zeros((batch,), jnp.int32),
      widths=jnp.zeros((len(spec.widths),), jnp.int32),
    ),
    log_probs=jnp.zeros((batch, max_length), jnp.float32),
    draft_log_probs=jnp.full((batch, max_length), NO_DRAFT, jnp.float32),
    origin=jnp.full((batch, max_length), PROMPT, jnp.int8),
  )
  context = step.context_of(state, target.vocab_size, rule)
  return state.replace(
    draft_state=drafter.init(params, context, prefill_output)
  )


# Functions here have an argument of the module's name.
_row_keys, _settings = row_keys, sampling.settings


@functools.partial(jax.jit, static_argnames=_PARTS, donate_argnames=("state",))
@_in_32_bits
def run(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  eos_ids: Array,
  max_rounds: Array | int = MAX_ROUNDS,
) -> DecodeState:
  """Rounds until every row is done, or `max_rounds` of them, without the host.

  The state's buffers are given to the result (donated): use only that.
  """
  max_rounds = jnp.asarray(max_rounds, jnp.int32)

  def unfinished(carry):
    state, n = carry
    return ~jnp.all(state.done) & (n < max_rounds)

  def body(carry):
    state, n = carry
    state = step.decode_step(target, drafter, rule, params, state, eos_ids)
    return state, n + 1

  return jax.lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def _check_shapes(
  prompt, prompt_length, sampling, limit=None, index=None
) -> None:
  """Refuses arguments of `start` whose shapes or types do not fit."""
  if np.ndim(prompt) != 2 or 0 in np.shape(prompt):
    raise ValueError(
      f"prompt has shape {np.shape(prompt)}; it must be [B, P], B rows of P "
      "token ids"
    )
  batch = np.shape(prompt)[0]
  rows = {"prompt_length": prompt_length, "limit": limit, "index": index}
  for name, value in {"prompt": prompt, **rows}.items():
    if value is None:
      continue
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
      raise ValueError(f"{name} is {dtype}; it must be integers")
  rows |= {f"sampling.{name}": x for name, x in vars(sampling).items()}
  for name, value in rows.items():
    if value is not None and np.shape(value) != (batch,):
      raise ValueError(
        f"{name} has shape {np.shape(value)}; it must be ({batch},), an entry "
        "for each row of the prompt"
      )


_INT32 = np.iinfo(np.int32)


def _within(name: str, value, low: int, high: int = _INT32.max) -> None:
  value = np.asarray(value)
  bad = value[(value < low) | (value > high)]
  if bad.size:
    raise ValueError(f"{name} = {bad.flat[0]}; it must be in {low}..{high}")


def _checked(
  target, prompt, prompt_length, eos_ids, max_length, sampling, limit, index
) -> tuple[Array | None, ...]:
  """Checks what a caller gives; returns the integers of it as int32 arrays.

  Returns:
    (prompt, prompt_length, eos_ids, limit, index).
  """
  _check_shapes(prompt, prompt_length, sampling, limit, index)
  eos_ids = np.asarray(eos_ids) if np.size(eos_ids) else np.zeros(0, np.int32)
  if not np.issubdtype(eos_ids.dtype, np.integer):
    raise ValueError(f"eos_ids is {eos_ids.dtype}; it must be integers")
  _within("eos_ids", eos_ids, _INT32.min)
  _within("max_length", max_length, 1)
  given = prompt, prompt_length, limit, index
  leaves = jax.tree.leaves((given, sampling))
  # Inside somebody's jit values are not known.
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    size = np.shape(prompt)[1]
    _within("prompt_length", prompt_length, 1, size)
    inside = np.arange(size) < np.asarray(prompt_length)[:, None]
    _within("token id", np.asarray(prompt)[inside], 0, target.vocab_size - 1)
    for name, value in {"limit": limit, "index": index}.items():
      _within(name, 0 if value is None else value, 0)
    _settings(len(inside), **vars(sampling))  # refuses what is out of range
  return tuple(
    x if x is None else jnp.asarray(x, jnp.int32)
    for x in (prompt, prompt_length, eos_ids, limit, index)
  )


@functools.partial(jax.jit, static_argnames=(*_PARTS, "max_length"))
def _generate(
  target, drafter, rule, params, prompt, prompt_length, key, eos_ids, **options
):
  state = start(
    target, drafter, rule, params, prompt, prompt_length, key, **options
  )
  return run(target, drafter, rule, params, state, eos_ids)


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

  Returns:
    The last DecodeState: row b's text is tokens[b, :length[b]]. A row whose
    next distribution is not finite stops before it, and its `fault` is set.

  Raises:
    ValueError: prompt_length out of 1..P; token ids that the target does not
      have; arrays of another batch size; P > max_length; a drafter whose
      siblings the rule is not right for; distributions over different
      vocabularies.
  """
  prompt, prompt_length, eos_ids, limit, index = _checked(
    target, prompt, prompt_length, eos_ids, max_length, sampling, limit, index
  )
  return _generate(
    target,
    drafter,
    rule,
    params,
    prompt,
    prompt_length,
    key,
    eos_ids,
    max_length=max_length,
    sampling=sampling,
    limit=limit,
    index=index,
  )


def _pending_only() -> Drafter:
  """Drafts nothing: autoregressive decoding."""

  def init(params, context, prefill_output):
    del params, context, prefill_output

  def propose(params, draft_state, context):
    del params
    pending = context.pending
    count = jnp.ones_like(context.length)
    return Draft(pending, None, None, count), draft_state

  def update(params, draft_state, context, draft, accept_result, target_output):
    del params, context, draft, accept_result, target_output
    return draft_state

  return Drafter(DraftSpec.of((-1,), name="none"), init, propose, update)


NO_DRAFTER = _pending_only()
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
) -> Iterator[DecodeState]:
  """`generate` in pieces: the state after prefill and after every few rounds.

  Each state gives its buffers to the next (they are donated): copy what you
  want to keep before asking for more. Arguments as `generate`'s.
  """
  if every < 1:
    raise ValueError(f"every = {every}; it must be >= 1")
  prompt, prompt_length, eos_ids, limit, index = _checked(
    target, prompt, prompt_length, eos_ids, max_length, sampling, limit, index
  )
  state = start(
    target,
    drafter,
    rule,
    params,
    prompt,
    prompt_length,
    key,
    max_length=max_length,
    sampling=sampling,
    limit=limit,
    index=index,
  )
  yield state
  while not bool(jnp.all(state.done)):
    state = run(target, drafter, rule, params, state, eos_ids, every)
    yield state
