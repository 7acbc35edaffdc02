"""The dice: walking a draft by a rule's law, drawing, trimming, counting.

Rules say laws and draw nothing (DESIGN rule 8); all of acceptance's noise is
drawn here. Invariant: a round is first walked to its end and then trimmed, so
an EOS or a limit never changes what was drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling, tree
from specdec.types import (
  ACCEPTED,
  BONUS,
  CORRECTION,
  DRAFT_FAULT,
  NO_DRAFT,
  NO_FAULT,
  PLAIN,
  TARGET_FAULT,
  AcceptanceRule,
  Array,
  DecodeState,
  Draft,
  Stats,
  Verdict,
)
from specdec.walk import WALKS, children, drafted


class Emission(NamedTuple):
  """What a round would write, before trimming: entry i follows path[i]."""

  tokens: Array  # [B, D+1] accepted tokens, then the next one
  origin: Array  # [B, D+1] int8
  log_probs: Array  # [B, D+1]
  draft_log_probs: Array  # [B, D+1]
  num_accepted: Array  # [B] before trimming
  sound: Array  # [B, D+1] bool: the target's distribution there is finite
  draft_sound: Array  # [B] bool: every distribution of the draft is finite


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
  normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, N]
  sound = jnp.isfinite(normaliser)
  if rule.walk == "last_success":
    # It weighs a chain as a whole, and nothing can follow a node that is not
    # sound: the chain ends there.
    node = jnp.arange(sound.shape[1])
    first = jnp.min(jnp.where(sound, len(node), node[None]), axis=-1)
    draft = draft._replace(count=jnp.minimum(draft.count, first + 1))
  if rule.walk == "coupled":
    path, num_accepted, next_token = _coupled_walk(draft, law, noise, depth)
  else:
    path, num_accepted, next_token = _walk(rule, draft, law, noise, depth)
  step = jnp.arange(depth + 1)
  kept = step[None] < num_accepted[:, None]  # [B, D+1]
  child = jnp.concatenate([path[:, 1:], path[:, -1:]], axis=1)
  # Where the path ends, the law that was refused is the first child's.
  own = children(draft, path) & drafted(draft)[:, None, :]  # [B, D+1, N]
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
  emission = Emission(
    tokens=tokens,
    origin=jnp.where(kept, ACCEPTED, ending).astype(jnp.int8),
    log_probs=logits[row, path, tokens] - normaliser[row, path],
    draft_log_probs=jnp.where(compared, drawn, NO_DRAFT),
    num_accepted=num_accepted,
    sound=sound[row, path],
    draft_sound=draft_sound,
  )
  return path, emission


def _walk(rule, draft, law, noise, depth):
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
  keep = jax.vmap(lambda r, p: rule.keep(row(*r), p))(rows, law)
  kept = (noise.accept(keep.shape[1]) < keep) & drafted(draft)
  path, num_accepted, last = WALKS[rule.walk].go(draft, kept, depth)
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


def trim(
  path: Array, emission: Emission, state: DecodeState, eos_ids: Array
) -> tuple[Verdict, Array, Array]:
  """Cuts a round at its first EOS and at the limit; nothing of a done row.

  A cut token becomes the pending one, as any last token does. A row is stopped
  before the first token whose distribution is not finite, and with all of a
  draft that was sampled from one.

  Returns:
    The verdict, done [B] and fault [B] after it.
  """
  step = jnp.arange(path.shape[1])
  ends = jnp.any(emission.tokens[..., None] == eos_ids[None, None], axis=-1)
  ends &= step[None] <= emission.num_accepted[:, None]
  before_end = jnp.min(jnp.where(ends, step[None], path.shape[1]), axis=-1)
  count = jnp.minimum(emission.num_accepted, before_end) + 1
  count = jnp.minimum(count, state.limit - state.length)
  count = jnp.where(state.done, 0, count)
  unsound = jnp.min(jnp.where(emission.sound, path.shape[1], step), axis=-1)
  fault = jnp.where(unsound < count, TARGET_FAULT, NO_FAULT)
  fault = jnp.where(emission.draft_sound | (count == 0), fault, DRAFT_FAULT)
  count = jnp.minimum(count, unsound)
  count = jnp.where(fault == DRAFT_FAULT, 0, count)
  last = jnp.maximum(count - 1, 0)
  next_token = jnp.take_along_axis(emission.tokens, last[:, None], axis=1)
  done = state.done | (before_end < count)
  done |= (state.length + count >= state.limit) | (fault != NO_FAULT)
  fault = jnp.where(state.done, state.fault, fault).astype(jnp.int8)
  return Verdict(path, last, next_token[:, 0], count), done, fault


def tally(
  stats: Stats,
  draft: Draft,
  emission: Emission,
  verdict: Verdict,
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
  committed = verdict.num_committed
  alive = committed > 0
  depth = jnp.atleast_2d(tree.depth(draft.parents))
  deepest = jnp.max(jnp.where(drafted(draft), depth, 0), axis=-1)
  # Positions behind the limit say nothing, whether the round came so far or
  # not; nor do those behind an EOS, where nothing was refused.
  deepest = jnp.minimum(deepest, room)
  uncut = committed > emission.num_accepted
  tried = jnp.where(uncut, deepest, jnp.minimum(deepest, committed))
  accepted = jnp.minimum(emission.num_accepted, committed)
  row = jnp.arange(committed.shape[0])
  ending = emission.origin[row, emission.num_accepted]
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
    judged=stats.judged + counted(accepted + refused),
    whole=stats.whole + whole,
    kept=stats.kept + jnp.where(whole, accepted, 0),
    nodes=stats.nodes + jnp.where(alive, draft.count - 1, 0),
    widths=stats.widths.at[chosen].add(1),
  )
