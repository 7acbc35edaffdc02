"""How rotary frequencies are scaled beyond the context of pre-training."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.models.checks import check_counts, check_positive
from specdec.utils.spelling import check_choice


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of rotary frequencies beyond the trained context.

  Kind 'linear' divides all frequencies by `factor`. Kind 'llama3' (Llama 3.1)
  divides those of wavelengths above original_length / low_frequency_factor,
  leaves those below original_length / high_frequency_factor unchanged, and
  interpolates between them (Llama 4: nothing lies between); original_length is
  the context of pre-training.
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192
  attention_factor: ClassVar[float] = 1.0

  def __post_init__(self):
    check_choice("rope scaling kind", self.kind, ("linear", "llama3"))
    check_positive(
      self, "factor", "low_frequency_factor", "high_frequency_factor"
    )
    check_counts(self, "original_length")
    low, high = self.low_frequency_factor, self.high_frequency_factor
    if self.kind == "llama3" and low > high:
      raise ValueError(
        f"low_frequency_factor = {low} must be <= high_frequency_factor = "
        f"{high}"
      )


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (arXiv:2309.00071): frequencies scaled by parts.

  A frequency that turns at least beta_fast times in original_length positions
  is kept, one that turns at most beta_slow times is divided by `factor`, and
  between them the pairs of dimensions pass linearly from one to the other.
  """

  factor: float
  original_length: int  # the context of pre-training
  attention_factor: float  # multiplies rotated queries and keys
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True  # the passage is between whole pairs of dimensions
  score_growth: float = 0.0  # a of `score_factor` (DeepSeek)
  kind: ClassVar[str] = "yarn"

  def __post_init__(self):
    check_positive(self, "factor", "attention_factor", "beta_fast", "beta_slow")
    check_counts(self, "original_length")
    if not 0 <= self.score_growth < 1e3:
      raise ValueError(
        f"score_growth = {self.score_growth}; it must be in 0..1000"
      )
    if self.beta_slow > self.beta_fast:
      raise ValueError(
        f"beta_slow = {self.beta_slow} must be <= beta_fast = {self.beta_fast}"
      )

  @property
  def score_factor(self) -> float:
    """Multiplies scores of attention: (1 + a / 10 log(factor))^2."""
    return (1 + 0.1 * self.score_growth * math.log(max(self.factor, 1))) ** 2


@dataclasses.dataclass(frozen=True)
class LongRope:
  """LongRoPE (arXiv:2402.13753): each frequency has a divisor of its own.

  All positions of all texts have the same divisors: the long ones if max_length
  exceeds original_length. Divisors that changed as a text grows would not fit
  the keys that are in the cache.
  """

  short_factors: tuple[float, ...]
  long_factors: tuple[float, ...]
  original_length: int  # the context of pre-training
  max_length: int  # longest text that is expected
  attention_factor: float  # multiplies rotated queries and keys
  kind: ClassVar[str] = "longrope"

  def __post_init__(self):
    check_positive(self, "attention_factor")
    check_counts(self, "original_length", "max_length")
    for name in ("short_factors", "long_factors"):
      check_positive(self, name, every=True)
    if len(self.short_factors) != len(self.long_factors):
      raise ValueError(
        f"{len(self.short_factors)} short_factors and "
        f"{len(self.long_factors)} long_factors; they must be as many"
      )

  @property
  def factors(self) -> tuple[float, ...]:
    """The divisors in use, one for each pair of rotated dimensions."""
    is_long = self.max_length > self.original_length
    return self.long_factors if is_long else self.short_factors


Scaling = RopeScaling | Yarn | LongRope


def from_fields(fields: Mapping[str, Any]) -> Scaling:
  """Returns the scaling of which dataclasses.asdict made these fields."""
  if "beta_fast" in fields:
    return Yarn(**fields)
  if "short_factors" in fields:
    lists = "short_factors", "long_factors"
    return LongRope(**{**fields, **{x: tuple(fields[x]) for x in lists}})
  return RopeScaling(**fields)
