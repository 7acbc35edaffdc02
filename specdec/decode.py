"""Draft, verify, accept: the whole generation as one device program.

Invariants (DESIGN section 3): tokens[b, length[b] - 1] is committed and has no
K/V yet; every row moves at its own pace; plain decoding is the draft of one
node through the very same loop; model, drafter and rule are handed in.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import prefill, sampling, tree
from specdec.types import (
  ACCEPTED,
  BONUS,
  CORRECTION,
  PLAIN,
  PROMPT,
  AcceptanceRule,
  Array,
  Context,
  DecodeState,
  Draft,
  Drafter,
  DraftSpec,
  Model,
  ModelOutput,
  Params,
  PyTree,
  Sampling,
  Stats,
  Verdict,
)

_MAX_ROUNDS = np.iinfo(np.int32).max


class Emission(NamedTuple):
  """What a round would write, before trimming: entry i follows path[i]."""

  tokens: Array  # [B, D+1] accepted tokens, then the next one
  origin: Array  # [B, D+1] int8
  log_probs: Array  # [B, D+1]
  draft_log_probs: Array  # [B, D+1]
  num_accepted: Array  # [B] before trimming


def draft_step(
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  vocab_size: int,
  rule: AcceptanceRule,
) -> tuple[Draft, DecodeState]:
  """Asks the drafter for its guesses. Takes nothing from the target's cache."""
  context = _context(state, vocab_size, rule)
  draft, draft_state = drafter.propose(params, state.draft_state, context)
  cache = state.target_cache
  if draft.resume is not None:  # its layers are the cache's own, written
    below = draft.resume.layers
    cache = cache.replace(layers=below + cache.layers[len(below) :])
  return draft, state.replace(draft_state=draft_state, target_cache=cache)


def verify_step(
  target: Model,
  params: PyTree,
  state: DecodeState,
  draft: Draft,
  spec: DraftSpec,
) -> tuple[ModelOutput, DecodeState]:
  """One pass of the target over a draft: row n of its output is node n's."""
  start, hidden = 0, None
  if draft.resume is not None:
    start, hidden = len(draft.resume.layers), draft.resume.hidden
  output, cache = target.apply(
    params,
    draft.tokens,
    state.target_cache,
    parents=None if spec.chain else draft.parents,
    start=start,
    hidden=hidden,
    features=spec.features or (),
  )
  return output, state.replace(target_cache=cache)


def accept_step(
  rule: AcceptanceRule,
  draft: Draft,
  logits: Array,
  law: Array,
  noise: sampling.Noise,
  depth: int,
) -> tuple[Array, Emission]:
  """Walks the draft by the rule's law and draws the token that follows.

  Args:
    logits: [B, N, V] of the target.
    law: [B, N, V] the same, warped to log-probabilities.
    depth: D, most tokens this draft can have accepted.

  Returns:
    path [B, D+1] and the emission, nothing trimmed yet.
  """
  if rule.walk == "coupled":
    path, num_accepted, next_token = _coupled_walk(draft, law, noise, depth)
  else:
    path, num_accepted, next_token = _walk(rule, draft, law, noise, depth)
  step = jnp.arange(depth + 1)
  kept = step[None] < num_accepted[:, None]  # [B, D+1]
  child = jnp.concatenate([path[:, 1:], path[:, -1:]], axis=1)
  # Where the path ends, the law that was refused is the first child's.
  own = _children(draft, path) & _drafted(draft)[:, None, :]  # [B, D+1, N]
  child = jnp.where(kept, child, jnp.argmax(own, axis=-1))
  compared = kept | jnp.any(own, axis=-1)
  tokens = jnp.take_along_axis(draft.tokens, child, axis=1)
  tokens = jnp.where(kept, tokens, next_token[:, None])
  ending = jnp.where(
    jnp.any(own, axis=-1),
    CORRECTION,
    jnp.where(draft.count[:, None] > 1, BONUS, PLAIN),
  )
  row = jnp.arange(tokens.shape[0])[:, None]
  normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, N]
  if draft.log_probs is None:
    same = tokens == jnp.take_along_axis(draft.tokens, child, axis=1)
    drawn = jnp.where(same, 0.0, -jnp.inf)
  else:
    drawn = draft.log_probs[row, child, tokens]
  emission = Emission(
    tokens=tokens,
    origin=jnp.where(kept, ACCEPTED, ending).astype(jnp.int8),
    log_probs=logits[row, path, tokens] - normaliser[row, path],
    draft_log_probs=jnp.where(compared, drawn, jnp.nan),
    num_accepted=num_accepted,
  )
  return path, emission


def _drafted(draft: Draft) -> Array:
  """[B, N] bool: the nodes in use."""
  return jnp.arange(draft.tokens.shape[1])[None] < draft.count[:, None]


def _children(draft: Draft, nodes: Array) -> Array:
  """[B, ..., N] bool: the nodes right below nodes [B, ...]."""
  parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
  parents = parents.reshape(
    parents.shape[0], *(1,) * (nodes.ndim - 1), parents.shape[1]
  )
  return parents == nodes[..., None]


def _walk(rule, draft, law, noise, depth):
  """Keeps nodes with the rule's probabilities, first kept child first."""
  static = isinstance(draft.parents, np.ndarray)  # one tree, known now

  def row(tokens, parents, log_probs, count):
    parents = draft.parents if static else parents
    return Draft(tokens, parents, log_probs, count)

  rows = (
    draft.tokens,
    None if static else draft.parents,
    draft.log_probs,
    draft.count,
  )
  keep = jax.vmap(lambda r, p: rule.keep(row(*r), p))(rows, law)
  kept = (noise.accept(keep.shape[1]) < keep) & _drafted(draft)

  def descend(carry, _):
    node, num_accepted, alive = carry
    candidates = _children(draft, node) & kept
    alive &= jnp.any(candidates, axis=-1)
    node = jnp.where(alive, jnp.argmax(candidates, axis=-1), node)
    return (node, num_accepted + alive, alive), node

  zero = jnp.zeros_like(draft.count)
  (last, num_accepted, _), path = jax.lax.scan(
    descend, (zero, zero, zero == 0), length=depth
  )
  path = jnp.concatenate([zero[:, None], path.T], axis=1)
  next_law = jax.vmap(lambda r, p, n: rule.next_law(row(*r), p, n))(
    rows, law, last
  )
  next_token = sampling.argmax(jnp.log(next_law) + noise.next(last))
  return path, num_accepted, next_token


def _coupled_walk(draft, law, noise, depth):
  """Draws the target's token at every node it comes to and follows it."""
  rows = jnp.arange(draft.count.shape[0])

  def step(carry):
    node, path, num_accepted, next_token, alive, d = carry
    token = sampling.argmax(
      law[rows, node] + noise.at_position(noise.length + d)
    )
    next_token = jnp.where(alive, token, next_token)
    same = draft.tokens == token[:, None]
    candidates = _children(draft, node) & _drafted(draft) & same
    alive &= jnp.any(candidates, axis=-1)
    node = jnp.where(alive, jnp.argmax(candidates, axis=-1), node)
    path = jnp.where(jnp.arange(depth + 1)[None] > d, node[:, None], path)
    return node, path, num_accepted + alive, next_token, alive, d + 1

  zero = jnp.zeros_like(draft.count)
  path = jnp.zeros((len(rows), depth + 1), jnp.int32)
  carry = jax.lax.while_loop(
    lambda carry: jnp.any(carry[4]) & (carry[5] <= depth),
    step,
    (zero, path, zero, zero, zero == 0, jnp.int32(0)),
  )
  return carry[1], carry[2], carry[3]


def _trim(
  path: Array, emission: Emission, state: DecodeState, eos_ids: Array
) -> tuple[Verdict, Array]:
  """Cuts a round at its first EOS and at the limit; nothing of a done row.

  A cut token becomes the pending one, as any last token does.

  Returns:
    The verdict, and done [B] after it.
  """
  step = jnp.arange(path.shape[1])
  ends = jnp.any(emission.tokens[..., None] == eos_ids[None, None], axis=-1)
  ends &= step[None] <= emission.num_accepted[:, None]
  before_end = jnp.min(jnp.where(ends, step[None], path.shape[1]), axis=-1)
  count = jnp.minimum(emission.num_accepted, before_end) + 1
  count = jnp.minimum(count, state.limit - state.length)
  count = jnp.where(state.done, 0, count)
  last = jnp.maximum(count - 1, 0)
  next_token = jnp.take_along_axis(emission.tokens, last[:, None], axis=1)
  done = state.done | (before_end < count)
  done |= state.length + count >= state.limit
  return Verdict(path, last, next_token[:, 0], count), done


def _count(
  stats: Stats, draft: Draft, emission: Emission, verdict: Verdict, chosen: int
) -> Stats:
  num_positions = stats.accepted.shape[1]
  position = jnp.arange(num_positions)
  committed = verdict.num_committed
  alive = committed > 0
  depth = jnp.atleast_2d(tree.depth(draft.parents))
  deepest = jnp.max(jnp.where(_drafted(draft), depth, 0), axis=-1)
  # Behind a cut nothing was refused: those positions say nothing.
  uncut = committed > emission.num_accepted
  tried = jnp.where(uncut, deepest, jnp.minimum(deepest, committed))
  accepted = jnp.minimum(emission.num_accepted, committed)

  def counted(limit):
    return (alive[:, None] & (position[None] < limit[:, None])).astype(
      jnp.int32
    )

  return stats.replace(
    rounds=stats.rounds + alive,
    drafted=stats.drafted + counted(tried),
    accepted=stats.accepted + counted(accepted),
    nodes=stats.nodes + jnp.where(alive, draft.count - 1, 0),
    widths=stats.widths.at[chosen].add(1),
  )


def _put(buffer: Array, new: Array, start: Array, count: Array) -> Array:
  """Writes new[b, :count[b]] to buffer[b] from start[b] on, and no more."""
  step = jnp.arange(new.shape[1])
  index = jnp.where(
    step[None] < count[:, None], start[:, None] + step[None], buffer.shape[1]
  )
  rows = jnp.arange(buffer.shape[0])[:, None]
  return buffer.at[rows, index].set(new.astype(buffer.dtype), mode="drop")


def _context(
  state: DecodeState, vocab_size: int, rule: AcceptanceRule
) -> Context:
  noise = _noise(state, vocab_size, rule)
  return Context(
    state.tokens, state.length, state.sampling, state.target_cache, noise.draft
  )


def _noise(state, vocab_size, rule) -> sampling.Noise:
  return sampling.Noise(
    keys=state.keys,
    length=state.length,
    vocab_size=vocab_size,
    coupled=rule.walk == "coupled",
    wanted=jnp.any(state.sampling.temperature > 0),
  )


def _trimmed_to(draft: Draft, width: int) -> Draft:
  """The first `width` nodes."""
  if width == draft.tokens.shape[1]:
    return draft
  resume = draft.resume
  if resume is not None:
    resume = resume._replace(hidden=resume.hidden[:, :width])
  return draft._replace(
    tokens=draft.tokens[:, :width],
    parents=draft.parents[..., :width],
    log_probs=None if draft.log_probs is None else draft.log_probs[:, :width],
    resume=resume,
  )


def decode_step(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  eos_ids: Array,
) -> DecodeState:
  """One round: every row that is not done grows by at least one token.

  The draft runs at the smallest static width that holds it, each width inside
  a loop of at most one turn: a cache carried through `lax.cond` or
  `lax.switch` would be copied every round (DESIGN rule 9).
  """
  spec = drafter.spec
  draft, state = draft_step(drafter, params, state, target.vocab_size, rule)
  _check_draft(draft, spec, target.vocab_size)
  if spec.chain:
    draft = draft._replace(parents=tree.chain(spec.max_nodes))

  def finish(chosen: int, state: DecodeState) -> DecodeState:
    width = spec.widths[chosen]
    part = _trimmed_to(draft, width)
    context = _context(state, target.vocab_size, rule)
    noise = _noise(state, target.vocab_size, rule)
    output, state = verify_step(target, params.target, state, part, spec)
    law = sampling.warp(output.logits, state.sampling)
    path, emission = accept_step(
      rule, part, output.logits, law, noise, min(spec.max_depth, width - 1)
    )
    verdict, done = _trim(path, emission, state, eos_ids)
    count = verdict.num_committed
    draft_state = drafter.update(
      params, state.draft_state, context, part, verdict, output
    )

    def put(buffer, new):
      return _put(buffer, new, state.length, count)

    return state.replace(
      tokens=put(state.tokens, emission.tokens),
      length=state.length + count,
      done=done,
      target_cache=kv.commit(
        state.target_cache, verdict.path, count, spec.chain
      ),
      draft_state=draft_state,
      stats=_count(state.stats, part, emission, verdict, chosen),
      log_probs=put(state.log_probs, emission.log_probs),
      draft_log_probs=put(state.draft_log_probs, emission.draft_log_probs),
      origin=put(state.origin, emission.origin),
    )

  if len(spec.widths) == 1:
    return finish(0, state)
  needed = jnp.max(jnp.where(state.done, 1, draft.count))
  choice = jnp.sum(needed > jnp.asarray(spec.widths[:-1]))
  for chosen in range(len(spec.widths)):
    turns = (choice == chosen).astype(jnp.int32)
    state = jax.lax.fori_loop(
      0, turns, lambda _, s, chosen=chosen: finish(chosen, s), state
    )
  return state


def _check_draft(draft: Draft, spec: DraftSpec, vocab_size: int) -> None:
  if draft.tokens.shape[1] != spec.max_nodes:
    raise ValueError(
      f"the drafter gave {draft.tokens.shape[1]} nodes; its spec says "
      f"max_nodes = {spec.max_nodes}"
    )
  if draft.log_probs is not None and draft.log_probs.shape[-1] != vocab_size:
    raise ValueError(
      f"the drafter's law is over {draft.log_probs.shape[-1]} tokens and the "
      f"target's over {vocab_size}; they must share one vocabulary"
    )


def _check_pair(drafter: Drafter, rule: AcceptanceRule) -> None:
  spec = drafter.spec
  if spec.siblings not in rule.siblings:
    raise ValueError(
      f"the drafter's siblings are {spec.siblings!r}; this rule is right for "
      f"{', '.join(sorted(rule.siblings))}"
    )
  ascending = tuple(sorted(set(spec.widths)))
  if spec.widths != ascending or spec.widths[-1:] != (spec.max_nodes,):
    raise ValueError(
      f"widths = {spec.widths}; they must ascend and end with max_nodes = "
      f"{spec.max_nodes}"
    )
  if spec.widths[0] < 1:
    raise ValueError(f"widths = {spec.widths}; each must be at least 1")


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
  _check_pair(drafter, rule)
  batch, size = prompt.shape
  if size > max_length:
    raise ValueError(
      f"the prompt buffer holds {size} tokens and max_length is {max_length}; "
      "max_length must be at least as long"
    )
  spec = drafter.spec
  chunk = min(prefill.CHUNK, size)
  slots = max(max_length + spec.max_nodes, size + chunk)
  length = prompt_length.astype(jnp.int32)
  limit = jnp.full((batch,), max_length) if limit is None else limit
  limit = jnp.minimum(limit, max_length).astype(jnp.int32)
  index = jnp.arange(batch) if index is None else index
  tokens = jnp.zeros((batch, max_length), jnp.int32).at[:, :size].set(prompt)
  cache, prefill_output = prefill.advance(
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
    sampling=sampling,
    target_cache=cache,
    draft_state=None,
    stats=Stats(
      rounds=jnp.zeros((batch,), jnp.int32),
      drafted=jnp.zeros((batch, spec.max_depth), jnp.int32),
      accepted=jnp.zeros((batch, spec.max_depth), jnp.int32),
      nodes=jnp.zeros((batch,), jnp.int32),
      widths=jnp.zeros((len(spec.widths),), jnp.int32),
    ),
    log_probs=jnp.zeros((batch, max_length), jnp.float32),
    draft_log_probs=jnp.full((batch, max_length), jnp.nan, jnp.float32),
    origin=jnp.full((batch, max_length), PROMPT, jnp.int8),
  )
  context = _context(state, target.vocab_size, rule)
  return state.replace(
    draft_state=drafter.init(params, context, prefill_output)
  )


_row_keys = sampling.row_keys  # `start` has an argument of the module's name


def run(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  eos_ids: Array,
  rounds: Array | int = _MAX_ROUNDS,
) -> DecodeState:
  """Rounds until every row is done, or `rounds` of them, without the host."""

  def unfinished(carry):
    state, n = carry
    return ~jnp.all(state.done) & (n < rounds)

  def step(carry):
    state, n = carry
    state = decode_step(target, drafter, rule, params, state, eos_ids)
    return state, n + 1

  return jax.lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


_STATIC = ("target", "drafter", "rule", "max_length")


@functools.partial(jax.jit, static_argnames=_STATIC)
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
    The last DecodeState: row b's text is tokens[b, :length[b]].

  Raises:
    ValueError: prompt longer than max_length; a drafter whose siblings the rule
      is not right for; laws over different vocabularies.
  """
  return _generate(
    target,
    drafter,
    rule,
    params,
    jnp.asarray(prompt, jnp.int32),
    jnp.asarray(prompt_length, jnp.int32),
    key,
    jnp.asarray(eos_ids, jnp.int32),
    max_length=max_length,
    sampling=sampling,
    limit=limit,
    index=index,
  )


def _pending_only() -> Drafter:
  """Drafts nothing: plain decoding."""

  def init(params, context, prefill_output):
    del params, context, prefill_output

  def propose(params, draft_state, context):
    del params
    pending = jnp.take_along_axis(
      context.tokens, context.length[:, None] - 1, axis=1
    )
    count = jnp.ones_like(context.length)
    return Draft(pending, tree.chain(1), None, count), draft_state

  def update(params, draft_state, context, draft, verdict, target_output):
    del params, context, draft, verdict, target_output
    return draft_state

  return Drafter(DraftSpec(1, 0, (1,)), init, propose, update)


PLAIN_DRAFTER = _pending_only()
PLAIN_RULE = AcceptanceRule(
  None, None, "coupled", frozenset({"none"}), lossless=True
)


def autoregress(target: Model, params: Params, *args, **options) -> DecodeState:
  """Plain decoding: `generate` with N = 1. Arguments as there, less the two.

  Its noise is addressed by position, so coupled speculation with the same key
  gives the same text.
  """
  return generate(target, PLAIN_DRAFTER, PLAIN_RULE, params, *args, **options)


_start = jax.jit(start, static_argnames=_STATIC)
_run = jax.jit(
  run, static_argnames=("target", "drafter", "rule"), donate_argnames=("state",)
)


def stream(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  *args,
  rounds: int = 4,
  eos_ids: Sequence[int] = (),
  **options,
) -> Iterator[DecodeState]:
  """`generate` in pieces: yields the state after prefill and every few rounds.

  Each state gives its buffers to the next (they are donated): copy what you
  want to keep before asking for more. Arguments as `generate`'s.
  """
  state = _start(target, drafter, rule, params, *args, **options)
  eos_ids = jnp.asarray(eos_ids, jnp.int32)
  yield state
  while not bool(jnp.all(state.done)):
    state = _run(target, drafter, rule, params, state, eos_ids, rounds)
    yield state
