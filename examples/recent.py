"""A drafter with a state: proposes what last followed each token of the row.

specdec.load("stdlib-11m", drafter="examples/recent.py:recent", k=4)

Its chains are as long as the shape says, which may decide that in every round:
python scripts/generate.py --drafter=examples/recent.py:recent --k=adaptive
"""

import jax
import jax.numpy as jnp

from specdec import draft_length
from specdec.types import Draft, Drafter, DrafterCost


def recent(target, shape):
  """Drafts chains of tokens, each the latest successor of the one before.

  Its state [B, V] is the last position at which a token has a successor, -1
  where there is none. A chain ends at a token that has none.
  """
  if not shape.spec.chain:
    raise ValueError("recent drafts chains")
  k, policy = shape.spec.max_depth, shape.policy
  draft_length.check_certainty(policy, "recent")
  spec = shape.spec._replace(siblings="deterministic", name="recent")

  def seen(state, tokens, positions, valid):
    """Remembers tokens [B, T] at positions [B, T]; those not valid are left."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    tokens = jnp.where(valid, tokens, state.shape[1])  # dropped
    return state.at[rows, tokens].max(positions, mode="drop")

  def init(params, context, prefill_output):
    batch, size = context.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), (batch, size))
    valid = positions < context.length[:, None] - 1
    state = jnp.full((batch, target.model.vocab_size), -1, jnp.int32)
    return seen(state, context.tokens, positions, valid)

  def propose(params, state, context):
    def extend(token, _):
      position = jnp.take_along_axis(state, token[:, None], axis=1)[:, 0]
      after = jnp.maximum(position, 0)[:, None] + 1
      after = jnp.take_along_axis(context.tokens, after, axis=1)[:, 0]
      return jnp.where(position < 0, token, after), (after, position >= 0)

    _, (tokens, followed) = jax.lax.scan(
      extend, context.pending[:, 0], length=k
    )
    count = 1 + jnp.sum(jnp.cumprod(followed, axis=0), axis=0, dtype=jnp.int32)
    tokens = jnp.concatenate([context.pending, tokens.T], axis=1)
    certainty = None
    if policy is not None:  # it decides how long the chain becomes
      certainty = jnp.zeros_like(count)  # one class: no token is surer
      decided, certainty = draft_length.count_levels(
        policy, context, k, certainty, able=count > 1
      )
      count = jnp.minimum(count, decided)
    return Draft(tokens, None, None, count, certainty=certainty), state

  def update(params, state, context, draft, accept_result, target_output):
    # Every committed token but the last now has a successor.
    path = accept_result.path
    tokens = jnp.take_along_axis(draft.tokens, path, axis=1)
    step = jnp.arange(path.shape[1])
    positions = context.length[:, None] - 1 + step[None]
    valid = step[None] < accept_result.num_committed[:, None]
    return seen(state, tokens, positions, valid)

  # A row of state; its reads are too few to count.
  cost = DrafterCost(row_bytes=4 * target.model.vocab_size, steps=0)
  return Drafter(spec, init, propose, update, cost)
