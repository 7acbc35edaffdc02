"""One round: draft, verify, accept, commit.

Invariants (DESIGN section 3): tokens[b, length[b] - 1] is committed and has no
KV yet; every row that is not done grows by at least one token; no cache goes
through a branch.
"""

import jax
import jax.numpy as jnp

from specdec import accept, sampling, tree
from specdec import cache as kv
from specdec.types import (
  AcceptanceRule,
  AcceptResult,
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
)


def draft_step(
  drafter: Drafter,
  params: Params,
  state: DecodeState,
  vocab_size: int,
  rule: AcceptanceRule,
) -> tuple[Draft, DecodeState]:
  """Runs the drafter, and puts the cache layers that it wrote in place."""
  context = context_of(state, vocab_size, rule)
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
  if draft.resume is not None and draft.resume.hidden is not None:
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
  state: DecodeState,
  depth: int,
  eos_ids: Array,
) -> tuple[AcceptResult, Array, Array, accept.RoundOutput]:
  """Warps the target's logits, walks the draft, draws, and trims.

  Args:
    logits: [B, N, V] of the target.
    state: before the round.
    depth: D, most tokens this draft can have accepted.

  Returns:
    The accept_result, done and fault [B] after it, and what was drawn.
  """
  target_log_probs = sampling.warp(logits, state.sampling)
  noise = _noise(state, logits.shape[-1], rule)
  path, round_output = accept.traverse_draft(
    rule, draft, logits, target_log_probs, noise, depth
  )
  return *accept.truncate(path, round_output, state, eos_ids), round_output


def _put(buffer: Array, new: Array, start: Array, count: Array) -> Array:
  """Writes new[b, :count[b]] to buffer[b] from start[b] on, and no more."""
  step = jnp.arange(new.shape[1])
  index = jnp.where(
    step[None] < count[:, None], start[:, None] + step[None], buffer.shape[1]
  )
  rows = jnp.arange(buffer.shape[0])[:, None]
  return buffer.at[rows, index].set(new.astype(buffer.dtype), mode="drop")


def context_of(
  state: DecodeState, vocab_size: int, rule: AcceptanceRule
) -> Context:
  """What the drafter may see of this state."""
  noise = _noise(state, vocab_size, rule)
  return Context(
    state.tokens, state.length, state.sampling, state.target_cache, noise.draft
  )


def _noise(state, vocab_size, rule) -> sampling.Noise:
  return sampling.Noise(
    keys=state.keys,
    length=state.length,
    vocab_size=vocab_size,
    coupled=rule.traversal == "coupled",
    wanted=jnp.any(state.sampling.temperature > 0),
  )


def _first_nodes(draft: Draft, width: int) -> Draft:
  """The first `width` nodes."""
  if width == draft.tokens.shape[1]:
    return draft
  resume = draft.resume
  if resume is not None and resume.hidden is not None:
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
  `lax.switch` would be copied every round (rule 9).
  """
  spec = drafter.spec
  draft, state = draft_step(drafter, params, state, target.vocab_size, rule)
  _check_draft(draft, spec, target.vocab_size)
  _check_room(state, spec)
  if spec.chain:
    draft = draft._replace(parents=tree.chain(spec.max_nodes))

  def finish(chosen: int, state: DecodeState) -> DecodeState:
    width = spec.widths[chosen]
    part = _first_nodes(draft, width)
    context = context_of(state, target.vocab_size, rule)
    output, state = verify_step(target, params.target, state, part, spec)
    depth = min(spec.max_depth, width - 1)
    accept_result, done, fault, round_output = accept_step(
      rule, part, output.logits, state, depth, eos_ids
    )
    count = accept_result.num_committed
    draft_state = drafter.update(
      params, state.draft_state, context, part, accept_result, output
    )

    def put(buffer, new):
      return _put(buffer, new, state.length, count)

    return state.replace(
      tokens=put(state.tokens, round_output.tokens),
      length=state.length + count,
      done=done,
      fault=fault,
      target_cache=kv.commit(
        state.target_cache, accept_result.path, count, spec.chain
      ),
      draft_state=draft_state,
      stats=accept.tally(
        state.stats,
        part,
        round_output,
        accept_result,
        state.limit - state.length,
        chosen,
      ),
      log_probs=put(state.log_probs, round_output.log_probs),
      draft_log_probs=put(state.draft_log_probs, round_output.draft_log_probs),
      origin=put(state.origin, round_output.origin),
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
  silent = draft.log_probs is None
  if silent != (spec.siblings == "deterministic") and spec.max_nodes > 1:
    raise ValueError(
      "the drafter handed over "
      f"{'no distribution' if silent else 'a distribution'} of its "
      f"draft tokens, and its spec says siblings = {spec.siblings!r}"
    )
  if draft.log_probs is not None and draft.log_probs.shape[-1] != vocab_size:
    raise ValueError(
      f"the drafter's distribution is over {draft.log_probs.shape[-1]} tokens "
      "and the "
      f"target's over {vocab_size}; they must share one vocabulary"
    )


def _check_room(state: DecodeState, spec: DraftSpec) -> None:
  slots, size = state.target_cache.num_slots, state.tokens.shape[1]
  if slots < size + spec.max_nodes:
    raise ValueError(
      f"the cache has {slots} slots; {size} tokens and a draft of "
      f"{spec.max_nodes} nodes need {size + spec.max_nodes}: start with the "
      "drafter that runs"
    )
