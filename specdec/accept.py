"""Acceptance: walking a draft by a rule's distribution, drawing, trimming,
counting.

Rules say distributions and draw nothing (rule 8); all of acceptance's noise is
drawn here. Invariant: a round is first walked to its end and then trimmed, so
an EOS or a limit never changes what was drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling, tree
from specdec.traversal import TRAVERSALS, children, drafted
from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  DRAFT_FAULT,
  NO_DRAFT,
  NO_FAULT,
  TARGET_FAULT,
  AcceptanceRule,
  AcceptResult,
  Array,
  DecodeState,
  Draft,
  Stats,
)


class RoundOutput(NamedTuple):
  """What a round would write, before trimming: entry i follows path[i]."""

  tokens: Array  # [B, D+1] accepted tokens, then the next one
  origin: Array  # [B, D+1] int8
  log_probs: Array  # [B, D+1]
  draft_log_probs: Array  # [B, D+1]
  num_accepted: Array  # [B] before trimming
  sound: Array  # [B, D+1] bool: the target's distribution there is finite
  draft_sound: Array  # [B] bool: every distribution of the draft is finite


def traverse_draft(
  rule: AcceptanceRule,
  draft: Draft,
  logits: Array,
  target_log_probs: Array,
  noise: sampling.Noise,
  depth: int,
) -> tuple[Array, RoundOutput]:
  """Walks the draft by the rule's distribution and draws the token that
  follows.

  Args:
    logits: [B, N, V] of the target.
    distribution: [B, N, V] the same, warped to log-probabilities.
    depth: D, most tokens this draft can have accepted.

  Returns:
    path [B, D+1] and the emission, nothing trimmed yet.
  """
  normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, N]
  sound = jnp.isfinite(normaliser)
  if rule.traversal == "last_success":
    # It weighs a chain as a whole, and nothing can follow a node that is not
    # sound: the chain ends there.
    node = jnp.arange(sound.shape[1])
    first = jnp.min(jnp.where(sound, len(node), node[None]), axis=-1)
    draft = draft._replace(count=jnp.minimum(draft.count, first + 1))
  if rule.traversal == "coupled":
    path, num_accepted, next_token = _traverse_coupled(
      draft, target_log_probs, noise, depth
    )
  else:
    path, num_accepted, next_token = _traverse(
      rule, draft, target_log_probs, noise, depth
    )
  step = jnp.arange(depth + 1)
  kept = step[None] < num_accepted[:, None]  # [B, D+1]
  child = jnp.concatenate([path[:, 1:], path[:, -1:]], axis=1)
  # Where the path ends, the distribution that was refused is the first child's.
  own = children(draft, path) & drafted(draft)[:, None, :]  # [B, D+1, N]
  child = jnp.where(kept, child, jnp.argmax(own, axis=-1))
  compared = kept | jnp.any(own, axis=-1)
  tokens = jnp.take_along_axis(draft.tokens, child, axis=1)
  tokens = jnp.where(kept, tokens, next_token[:, None])
  ending = jnp.where(
    jnp.any(own, axis=-1),
    CORRECTION,
    jnp.where(draft.count[:, None] > 1, BONUS, BASELINE),
  )
  row = jnp.arange(tokens.shape[0])[:, None]
  if draft.log_probs is None:
    same = tokens == jnp.take_along_axis(draft.tokens, child, axis=1)
    drawn = jnp.where(same, 0.0, -jnp.inf)
    draft_sound = jnp.ones_like(draft.count, bool)
  else:
    drawn = draft.log_probs[row, child, tokens]
    # A distribution that is not finite is nan at its own draw, too.
    chosen = draft.tokens[..., None]
    chosen = jnp.take_along_axis(draft.log_probs, chosen, axis=-1)[..., 0]
    draft_sound = ~jnp.any(jnp.isnan(chosen) & drafted(draft), axis=-1)
  round_output = RoundOutput(
    tokens=tokens,
    origin=jnp.where(kept, ACCEPTED, ending).astype(jnp.int8),
    log_probs=logits[row, path, tokens] - normaliser[row, path],
    draft_log_probs=jnp.where(compared, drawn, NO_DRAFT),
    num_accepted=num_accepted,
    sound=sound[row, path],
    draft_sound=draft_sound,
  )
  return path, round_output


def _traverse(rule, draft, target_log_probs, noise, depth):
  """Keeps nodes with the rule's probabilities and walks as the rule says."""
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
  accept_prob = jax.vmap(lambda r, p: rule.accept_prob(row(*r), p))(
    rows, target_log_probs
  )
  kept = (noise.accept(accept_prob.shape[1]) < accept_prob) & drafted(draft)
  path, num_accepted, last = TRAVERSALS[rule.traversal].go(draft, kept, depth)
  residual = jax.vmap(lambda r, p, n: rule.residual(row(*r), p, n))(
    rows, target_log_probs, last
  )
  next_token = sampling.argmax(jnp.log(residual) + noise.next(last))
  return path, num_accepted, next_token


def _traverse_coupled(draft, target_log_probs, noise, depth):
  """Draws the target's token at every node it comes to and follows it."""
  rows = jnp.arange(draft.count.shape[0])

  def step(carry):
    node, path, num_accepted, next_token, alive, d = carry
    token = sampling.argmax(
      target_log_probs[rows, node] + noise.at_position(noise.length + d)
    )
    next_token = jnp.where(alive, token, next_token)
    same = draft.tokens == token[:, None]
    candidates = children(draft, node) & drafted(draft) & same
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


def truncate(
  path: Array, round_output: RoundOutput, state: DecodeState, eos_ids: Array
) -> tuple[AcceptResult, Array, Array]:
  """Cuts a round at its first EOS and at the limit; nothing of a done row.

  A cut token becomes the pending one, as any last token does. A row is stopped
  before the first token whose distribution is not finite, and with all of a
  draft that was sampled from one.

  Returns:
    The accept_result, done [B] and fault [B] after it.
  """
  step = jnp.arange(path.shape[1])
  ends = jnp.any(round_output.tokens[..., None] == eos_ids[None, None], axis=-1)
  ends &= step[None] <= round_output.num_accepted[:, None]
  before_end = jnp.min(jnp.where(ends, step[None], path.shape[1]), axis=-1)
  count = jnp.minimum(round_output.num_accepted, before_end) + 1
  count = jnp.minimum(count, state.limit - state.length)
  count = jnp.where(state.done, 0, count)
  unsound = jnp.min(jnp.where(round_output.sound, path.shape[1], step), axis=-1)
  fault = jnp.where(unsound < count, TARGET_FAULT, NO_FAULT)
  fault = jnp.where(round_output.draft_sound | (count == 0), fault, DRAFT_FAULT)
  count = jnp.minimum(count, unsound)
  count = jnp.where(fault == DRAFT_FAULT, 0, count)
  last = jnp.maximum(count - 1, 0)
  next_token = jnp.take_along_axis(round_output.tokens, last[:, None], axis=1)
  done = state.done | (before_end < count)
  done |= (state.length + count >= state.limit) | (fault != NO_FAULT)
  fault = jnp.where(state.done, state.fault, fault).astype(jnp.int8)
  return AcceptResult(path, last, next_token[:, 0], count), done, fault


def tally(
  stats: Stats,
  draft: Draft,
  round_output: RoundOutput,
  accept_result: AcceptResult,
  room: Array,
  chosen: int,
) -> Stats:
  """Adds a round to the counts.

  Args:
    room: [B] tokens that the length limit still let the row have.
    chosen: number of the static width that it ran at.
  """
  num_positions = stats.accepted.shape[1]
  position = jnp.arange(num_positions)
  committed = accept_result.num_committed
  alive = committed > 0
  depth = jnp.atleast_2d(tree.depth(draft.parents))
  deepest = jnp.max(jnp.where(drafted(draft), depth, 0), axis=-1)
  # Positions behind the limit say nothing, whether the round came so far or
  # not; nor do those behind an EOS, where nothing was refused.
  deepest = jnp.minimum(deepest, room)
  uncut = committed > round_output.num_accepted
  tried = jnp.where(uncut, deepest, jnp.minimum(deepest, committed))
  accepted = jnp.minimum(round_output.num_accepted, committed)
  row = jnp.arange(committed.shape[0])
  ending = round_output.origin[row, round_output.num_accepted]
  refused = uncut & (ending == CORRECTION)

  whole = alive & (room >= num_positions)

  def counted(limit):
    return (alive[:, None] & (position[None] < limit[:, None])).astype(
      jnp.int32
    )

  return stats.replace(
    rounds=stats.rounds + alive,
    emitted=stats.emitted + committed,
    drafted=stats.drafted + counted(tried),
    accepted=stats.accepted + counted(accepted),
    evaluated=stats.evaluated + counted(accepted + refused),
    whole=stats.whole + whole,
    kept=stats.kept + jnp.where(whole, accepted, 0),
    nodes=stats.nodes + jnp.where(alive, draft.count - 1, 0),
    widths=stats.widths.at[chosen].add(1),
  )
