"""Exact match: greedy, and coupled to the noise of autoregressive sampling.

Both keep a drafted token only where the target would emit that very token, so
the text is autoregressive decoding's, token for token. Coupled: drafter and
target decide a position by the same Gumbel vector (rule 4); the output then
depends on the seed alone, not on drafter, k or batch.
"""

import jax
import jax.numpy as jnp

from specdec import draft_tree, sampling
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


@cached
def greedy() -> AcceptanceRule:
  """Keeps the target's likeliest token (blockwise decoding, arXiv:1811.03115).

  For temperature 0 only: at any other it emits the mode, not a sample, so
  callers must refuse it there (`scripts/generate.py` does).
  """

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    best = sampling.argmax(target_log_probs)  # [N]
    likeliest = draft.tokens == best[jnp.asarray(draft.parents)]
    return likeliest.astype(jnp.float32)

  def residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
    best = sampling.argmax(target_log_probs[node])
    return jax.nn.one_hot(best, target_log_probs.shape[-1])

  kinds = frozenset(SIBLINGS)
  return AcceptanceRule(
    accept_prob, residual, "first_child", kinds, lossless=True, name="greedy"
  )


@cached
def coupled() -> AcceptanceRule:
  """Accepts what autoregressive sampling with the same seed would draw.

  A draft token x that was drawn with the target's own noise is the target's
  choice with probability 1 / sum_y max(p_y q_x / p_x, q_y): over all x a little
  less often than rejection accepts. `accept_prob` says so, to compare rules by;
  it is nan for siblings that were drawn, whose common noise has no such simple
  distribution.
  """

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    parents = jnp.asarray(draft.parents)
    above = jnp.maximum(parents, 0)
    facing = jnp.exp(target_log_probs[above])  # [N, V]
    nodes = jnp.arange(len(parents))
    target = facing[nodes, draft.tokens]
    if draft.log_probs is None:
      # The target's choice is x, and none of the earlier siblings, which
      # differ.
      earlier = draft_tree.earlier_siblings(parents)
      left = 1.0 - jnp.sum(jnp.where(earlier, target[None, :], 0.0), axis=-1)
      return jnp.where(
        left > 0, jnp.minimum(target / jnp.where(left > 0, left, 1.0), 1.0), 0.0
      )
    drawn = jnp.exp(draft.log_probs)
    share = drawn[nodes, draft.tokens] / jnp.where(target > 0, target, 1.0)
    most = jnp.maximum(facing * share[:, None], drawn)
    accepted = jnp.where(target > 0, 1.0 / jnp.sum(most, axis=-1), 0.0)
    alone = jnp.sum(parents[:, None] == parents[None, :], axis=-1) == 1
    return jnp.where(alone, accepted, jnp.nan)

  kinds = frozenset(SIBLINGS)
  return AcceptanceRule(
    accept_prob, None, "coupled", kinds, lossless=True, name="coupled"
  )
