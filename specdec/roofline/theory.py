"""Computes the gain of speculative decoding from acceptance and cost.

Symbols: k draft tokens a round; prefix_acceptance[i] = P(the first i + 1 draft
tokens are all accepted); cost = time of a draft step over time of a target
step. Leviathan et al. (arXiv:2211.17192) write alpha, gamma and c, for a rate
that is i.i.d. over positions. Where rates differ between positions or texts,
only the curve predicts right: expected tokens are convex in the rate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def iid_prefix_acceptance(alpha: float, k: int) -> np.ndarray:
  """Returns the curve [k] of an acceptance rate alpha, i.i.d. over positions.

  Raises:
    ValueError: alpha is outside [0, 1] or k < 0.
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f"acceptance {alpha:g} is outside [0, 1]")
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  return float(alpha) ** np.arange(1, k + 1)


def check_prefix_acceptance(prefix_acceptance: Sequence[float]) -> np.ndarray:
  """Returns the curve as float [k], checked.

  Raises:
    ValueError: an entry is outside [0, 1], or exceeds the one before it.
  """
  curve = np.asarray(prefix_acceptance, float)
  for value in curve:
    if not 0 <= value <= 1:
      raise ValueError(f"acceptance {value:g} is outside [0, 1]")
  if np.any(np.diff(curve) > 0):
    raise ValueError(
      f"prefix_acceptance {curve.tolist()} ascends: a draft token is accepted "
      "only if all before it are"
    )
  return curve


def expected_tokens(prefix_acceptance: Sequence[float]) -> float:
  """Returns E[tokens per round]: 1 and the sum of the checked curve."""
  return 1.0 + float(np.sum(check_prefix_acceptance(prefix_acceptance)))


def speedup(prefix_acceptance: Sequence[float], cost: float) -> float:
  """Returns the speedup if a pass of k + 1 tokens costs one of 1 (theorem 3.8).

  Raises:
    ValueError: the cost is negative or not finite, or the curve is none.
  """
  if not 0 <= cost < np.inf:
    raise ValueError(f"cost = {cost:g}; it must be finite and >= 0")
  tokens = expected_tokens(prefix_acceptance)
  return tokens / (len(prefix_acceptance) * cost + 1.0)


def operations(prefix_acceptance: Sequence[float], cost: float) -> float:
  """Returns operations per token over those of the baseline (theorem 3.11).

  Args:
    cost: operations of a draft step over those of a target step.

  Raises ValueError as `speedup`.
  """
  k = len(prefix_acceptance)
  tokens = speedup(prefix_acceptance, cost) * (k * cost + 1)
  return (k * cost + k + 1) / tokens


def finished(prefix_acceptance: Sequence[float], tokens: int) -> np.ndarray:
  """Returns P(`tokens` tokens are done after at most r rounds), [tokens + 1].

  Assumes independent rounds. Rounds of one text are correlated, so measured
  lengths spread wider.
  """
  reached = np.concatenate([[1.0, 1.0], prefix_acceptance, [0.0]])
  distribution = reached[:-1] - reached[1:]  # of the tokens of a round
  # Distribution of the number of tokens so far; the last entry absorbs.
  lengths = np.zeros(tokens + 1)
  lengths[0], done = 1.0, [0.0]
  for _ in range(tokens):
    longer = np.convolve(lengths[:-1], distribution)
    last = lengths[-1] + longer[tokens:].sum()
    lengths = np.append(longer[:tokens], last)
    done.append(float(last))
  return np.minimum(done, 1.0)


class Latency(NamedTuple):
  """Seconds per token, over texts of some length."""

  mean: float
  p99: float  # exceeded by 1 text in 100


def latency(
  prefix_acceptance: Sequence[float], round_seconds: float, tokens: int = 128
) -> Latency:
  """Returns the latency of texts of `tokens` tokens, one text at a time."""
  done = finished(prefix_acceptance, tokens)
  mean = float(np.sum(1 - done))
  p99 = int(np.argmax(done >= 0.99 - 1e-12))
  return Latency(mean * round_seconds / tokens, p99 * round_seconds / tokens)


class PowerLaw(NamedTuple):
  """Acceptance by draft size: 1 - alpha = scale * parameters^-exponent."""

  scale: float
  exponent: float

  def alpha(self, parameters: float) -> float:
    """Returns the acceptance rate of a draft with so many parameters."""
    return float(np.clip(1 - self.scale * parameters**-self.exponent, 0, 1))


def fit_power_law(
  parameters: Sequence[float], alphas: Sequence[float]
) -> PowerLaw:
  """Fits a power law by least squares on the logarithms.

  Raises:
    ValueError: there are fewer than two sizes, a size is not finite and > 0, or
      an alpha is outside (0, 1).
  """
  for size in parameters:
    if not 0 < size < np.inf:
      raise ValueError(f"{size:g} parameters; it must be finite and > 0")
  if len(set(parameters)) < 2:
    raise ValueError("a power law of draft size needs two sizes")
  for alpha in alphas:
    if not 0 < alpha < 1:
      raise ValueError(f"acceptance {alpha:g} is outside (0, 1)")
  slope, height = np.polyfit(np.log(parameters), np.log1p(-np.array(alphas)), 1)
  return PowerLaw(float(np.exp(height)), float(-slope))
