"""Exact match: greedy, and coupled to the noise of plain sampling.

Both keep a drafted token only where the target would emit that very token, so
the text is plain decoding's, token for token. Coupled: drafter and target
decide a position by the same Gumbel vector (DESIGN rule 4); the output then
depends on the seed alone, not on drafter, k or batch.
"""

import jax
import jax.numpy as jnp

from specdec import sampling
from specdec.types import AcceptanceRule, Array, Draft

_ANY_SIBLINGS = frozenset({"none", "iid", "without_replacement", "point_mass"})


def greedy() -> AcceptanceRule:
  """Keeps the target's likeliest token (blockwise decoding, arXiv:1811.03115).

  A law for temperature 0 only: at any other it emits the mode, not a sample, so
  callers must refuse it there (`scripts/generate.py` does).
  """

  def keep(draft: Draft, target_log_probs: Array) -> Array:
    best = sampling.argmax(target_log_probs)  # [N]
    return (draft.tokens == best[jnp.asarray(draft.parents)]).astype(
      jnp.float32
    )

  def next_law(draft: Draft, target_log_probs: Array, node: Array) -> Array:
    del draft
    best = sampling.argmax(target_log_probs[node])
    return jax.nn.one_hot(best, target_log_probs.shape[-1])

  return AcceptanceRule(
    keep, next_law, "first_child", _ANY_SIBLINGS, lossless=True
  )


def coupled() -> AcceptanceRule:
  """Keeps what plain sampling with the same seed would have drawn.

  Kept with probability sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) where the
  drafter samples: a little less often than rejection keeps.
  """
  return AcceptanceRule(None, None, "coupled", _ANY_SIBLINGS, lossless=True)
