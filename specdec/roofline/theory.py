"""What speculation gains, from how often draft tokens survive and what passes
cost.

Symbols: k draft tokens a round; prefix_acceptance[i] = P(the first i + 1 draft
tokens are all kept); cost = time of one draft step over time of one target
step. Leviathan et al. (arXiv:2211.17192) write alpha, gamma and c for a rate
that is the same at every position, independently; where rates differ between
positions or texts, only the curve predicts right, for the expectation is convex
in them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def iid_prefix_acceptance(alpha: float, k: int) -> np.ndarray:
  """[k] prefix_acceptance where every draft token is kept with probability
  alpha.

  Raises:
    ValueError: alpha is outside [0, 1] or k < 0.
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f"acceptance {alpha:g} is outside [0, 1]")
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  return float(alpha) ** np.arange(1, k + 1)


def check_prefix_acceptance(prefix_acceptance: Sequence[float]) -> np.ndarray:
  """[k] float; refuses what no prefix_acceptance curve can be.

  Raises:
    ValueError: an entry is outside [0, 1], or they ascend.
  """
  curve = np.asarray(prefix_acceptance, float)
  for value in curve:
    if not 0 <= value <= 1:
      raise ValueError(f"acceptance {value:g} is outside [0, 1]")
  if np.any(np.diff(curve) > 0):
    raise ValueError(
      f"prefix_acceptance {curve.tolist()} ascends: a draft token is kept only "
      "behind others"
    )
  return curve


def expected_tokens(prefix_acceptance: Sequence[float]) -> float:
  """Tokens of a round: the target's own and every draft token that survives.

  Raises:
    ValueError: as `check_survival` does.
  """
  return 1.0 + float(np.sum(check_prefix_acceptance(prefix_acceptance)))


def _check_cost(cost: float) -> None:
  if not 0 <= cost < np.inf:
    raise ValueError(f"cost = {cost:g}; it must be finite and >= 0")


def speedup(prefix_acceptance: Sequence[float], cost: float) -> float:
  """Over autoregressive decoding, were a pass of k + 1 tokens one of 1 (theorem
  3.8).

  Raises:
    ValueError: the cost is negative or not finite, or as `check_survival`.
  """
  _check_cost(cost)
  return expected_tokens(prefix_acceptance) / (
    len(prefix_acceptance) * cost + 1.0
  )


def operations(prefix_acceptance: Sequence[float], cost: float) -> float:
  """Arithmetic over autoregressive decoding's (theorem 3.11).

  Args:
    cost: operations of a draft step over those of a target step.

  Raises:
    ValueError: the cost is negative or not finite, or as `check_survival`.
  """
  _check_cost(cost)
  k = len(prefix_acceptance)
  return (k * cost + k + 1) / expected_tokens(prefix_acceptance)


def best_k(alpha: float, cost: float, most: int = 100) -> tuple[int, float]:
  """(k, speedup) that gains most by theorem 3.8; 0 where nothing does."""
  gains = [
    speedup(iid_prefix_acceptance(alpha, k), cost) for k in range(most + 1)
  ]
  best = int(np.argmax(gains))
  return best, gains[best]


def round_distribution(prefix_acceptance: Sequence[float]) -> np.ndarray:
  """[k + 2] P(a round emits j tokens), j from 0 on."""
  reached = np.concatenate([[1.0, 1.0], prefix_acceptance, [0.0]])
  return reached[:-1] - reached[1:]


def finished(prefix_acceptance: Sequence[float], tokens: int) -> np.ndarray:
  """[tokens + 1] P(so many tokens are there after at most r rounds).

  Rounds are independent of one another here; in one text they resemble each
  other, so real ends spread wider.
  """
  distribution = round_distribution(prefix_acceptance)
  lengths = np.zeros(
    tokens + 1
  )  # distribution of the text's length; the last absorbs
  lengths[0], done = 1.0, [0.0]
  for _ in range(tokens):
    longer = np.convolve(lengths[:-1], distribution)
    last = lengths[-1] + longer[tokens:].sum()
    lengths = np.append(longer[:tokens], last)
    done.append(float(last))
  return np.minimum(done, 1.0)


class Latency(NamedTuple):
  """Seconds a token, over texts of some length."""

  mean: float
  p99: float  # 1 text in 100 takes longer


def latency(
  prefix_acceptance: Sequence[float], round_seconds: float, tokens: int = 128
) -> Latency:
  """Of texts of so many tokens, each alone in its row."""
  done = finished(prefix_acceptance, tokens)
  mean = float(np.sum(1 - done))
  p99 = int(np.argmax(done >= 0.99 - 1e-12))
  return Latency(mean * round_seconds / tokens, p99 * round_seconds / tokens)


class PowerLaw(NamedTuple):
  """Acceptance against draft size: 1 - alpha = scale * parameters^-exponent."""

  scale: float
  exponent: float

  def alpha(self, parameters: float) -> float:
    return float(np.clip(1 - self.scale * parameters**-self.exponent, 0, 1))


def fit_power_law(
  parameters: Sequence[float], alphas: Sequence[float]
) -> PowerLaw:
  """Through measured points, least squares of the logarithms.

  Raises:
    ValueError: fewer than two sizes, one that is not finite and > 0, or an
      alpha outside (0, 1).
  """
  for size in parameters:
    if not 0 < size < np.inf:
      raise ValueError(f"{size:g} parameters; it must be finite and > 0")
  if len(set(parameters)) < 2:
    raise ValueError("a distribution of draft size needs two sizes")
  for alpha in alphas:
    if not 0 < alpha < 1:
      raise ValueError(f"acceptance {alpha:g} is outside (0, 1)")
  slope, height = np.polyfit(np.log(parameters), np.log1p(-np.array(alphas)), 1)
  return PowerLaw(float(np.exp(height)), float(-slope))
