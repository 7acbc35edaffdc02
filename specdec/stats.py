"""Counts of one generation: what was drafted, evaluated and accepted."""

import jax.numpy as jnp

from specdec import draft_tree
from specdec.traversal import drafted
from specdec.types import (
  CORRECTION,
  NEVER,
  AcceptResult,
  Array,
  Draft,
  Outcomes,
  RoundOutput,
  Stats,
)

_FADE = 0.98  # of outcomes, for every later round that drafts


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
  depth = jnp.atleast_2d(draft_tree.depth(draft.parents))
  deepest = jnp.max(jnp.where(drafted(draft), depth, 0), axis=-1)
  # Positions after the limit say nothing, whether the round came so far or
  # not; nor do those after an EOS, where nothing was refused.
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


def remember(
  outcomes: Outcomes, draft: Draft, before: Stats, after: Stats
) -> Outcomes:
  """Adds a round's chain to what is known of draft tokens.

  Args:
    draft: as verified.
    before, after: of `tally`: the counts without and with the round.
  """
  pairs = [(x.accepted, x.evaluated) for x in (after, before)]
  new = jnp.stack([a - b for a, b in zip(*pairs)], axis=-1)  # [B, D, 2]
  drafted = after.drafted[:, 0] > before.drafted[:, 0]
  fade = jnp.where(drafted, _FADE, 1.0)[:, None, None]
  by_class = fade * outcomes.by_class
  if draft.certainty is not None:
    certainty = draft.certainty[:, 1:]
    classes = jnp.arange(by_class.shape[1])[None, None]
    same = 1.0 * (certainty[..., None] == classes)  # [B, N - 1, classes]
    verified = 1.0 * new[:, : same.shape[1]]
    by_class += jnp.einsum("bdc,bdx->bcx", same, verified)
  # A row that has just arrived says nothing: the others know how long it is.
  rest = jnp.minimum(jnp.min(outcomes.rest) + 1, NEVER)
  rest = jnp.where(jnp.any(drafted), 0, rest)
  return Outcomes(
    fade * outcomes.by_depth + new,
    by_class,
    jnp.where(drafted, 0, outcomes.idle + 1),
    jnp.broadcast_to(rest, drafted.shape),
  )
