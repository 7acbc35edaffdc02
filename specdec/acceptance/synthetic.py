"""Acceptance at a given rate, whatever was drafted: to study speed alone.

The expected number of tokens a round is then known before it is measured, for
any shape with random weights. Nothing is compared with the target: the text
means nothing, and whoever prints it says so (AcceptanceRule.caveat).
"""

import math
import numbers
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specdec import draft_tree
from specdec.acceptance.distributions import target_residual
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached

_MOST = 4096  # draft tokens that a length may speak of


def rates_of_length(length: float) -> tuple[float, ...]:
  """Returns conditional rates by depth whose mean acceptance length is given.

  The schedule is vLLM's (synthetic_acceptance_length), of least variance: with
  n = floor(length - 1), tokens 1 to n are accepted, token n + 1 with what is
  left of length - 1, and none after it. vLLM's rates are unconditional, u_d
  that the first d tokens are accepted; ours are u_d / u_(d-1), which differ
  from them nowhere but where both are 0.

  Raises:
    ValueError: the length is below 1, or is no number.
  """
  number = isinstance(length, numbers.Real) and not isinstance(length, bool)
  if not number:
    raise ValueError(f"length = {length!r:.60}; it must be a number")
  if not 1 <= length <= _MOST + 1:
    raise ValueError(
      f"length = {length:g}; a mean acceptance length is at least 1, and at "
      "most k + 1"
    )
  whole = math.floor(length - 1)
  return (1.0,) * whole + (length - 1 - whole, 0.0)


def prefix_acceptance(
  k: int,
  rates: float | Sequence[float] | None = None,
  length: float | None = None,
) -> list[float]:
  """Returns P(the first d tokens of a chain are kept) of `synthetic`, d = 1..k.

  Args:
    rates, length: as of `synthetic`.
  """
  rates = rates_of_length(length) if rates is None else np.atleast_1d(rates)
  place = np.minimum(np.arange(k), len(rates) - 1)
  return np.cumprod(np.asarray(rates, float)[place]).tolist()


@cached
def synthetic(
  rates: float | Sequence[float] | None = None, length: float | None = None
) -> AcceptanceRule:
  """Keeps a token at depth d with probability rates[d - 1].

  Args:
    rates: P(kept | its parent was kept and its earlier siblings refused), by
      depth; the last one, or the only one, holds for all deeper ones.
    length: instead, the mean acceptance length of chains, 1 to k + 1: 1 + the
      mean number of accepted tokens (`rates_of_length`). A round that the
      length limit cuts short accepts less.

  Raises:
    ValueError: there is no rate, or one outside [0, 1]; both are given; or a
      length below 1.
  """
  if (rates is None) == (length is None):
    raise ValueError("synthetic: give rates or length, one of them")
  name = "synthetic acceptance"
  if length is not None:
    rates = rates_of_length(length)
    name += f" of mean length {length:g} in chains"
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
    caveat=f"{name}: the text is meaningless",
  )
