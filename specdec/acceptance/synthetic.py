"""Acceptance at a given rate, whatever was drafted: to study speed alone.

The expected number of tokens a round is then known before it is measured, for
any shape with random weights. Nothing is compared with the target: the text
means nothing, and whoever prints it says so (AcceptanceRule.caveat).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specdec import draft_tree
from specdec.acceptance.distributions import target_residual
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


@cached
def synthetic(rates: float | Sequence[float]) -> AcceptanceRule:
  """Keeps a token at depth d with probability rates[d - 1].

  Args:
    rates: P(kept | its parent was kept and its earlier siblings refused), by
      depth; the last one, or the only one, holds for all deeper ones.

  Raises:
    ValueError: there is no rate, or one outside [0, 1].
  """
  rates = tuple(map(float, rates if np.ndim(rates) else [rates]))
  if not rates:
    raise ValueError("rates is empty; give at least one, in [0, 1]")
  for rate in rates:
    if not 0 <= rate <= 1:
      raise ValueError(f"rate {rate:g} is outside [0, 1]")

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    depth = jnp.asarray(draft_tree.depth(draft.parents))
    place = jnp.clip(depth - 1, 0, len(rates) - 1)
    return jnp.asarray(rates, jnp.float32)[place]

  return AcceptanceRule(
    accept_prob,
    target_residual,
    "first_child",
    frozenset(SIBLINGS),
    lossless=False,
    name="synthetic",
    caveat="synthetic acceptance: the text is meaningless",
  )
