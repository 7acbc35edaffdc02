"""The cost of one round: its passes and its overhead."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from specdec.roofline.cost import Cost


@dataclasses.dataclass(frozen=True)
class Overhead:
  """Seconds of a round beyond the sum of its passes.

  Covers sampling, acceptance and commit, and the difference (of either sign)
  between a pass inside the loop and the same pass timed in isolation.

  Attributes:
    rows: (batch, seconds per round, seconds per draft pass), ascending in
      batch; interpolated linearly in log batch, constant outside.
  """

  rows: tuple[tuple[float, float, float], ...] = ()

  def seconds(self, batch: float, levels: int) -> float:
    """Returns the overhead of a round with so many draft passes."""
    if not self.rows:
      return 0.0
    batches, fixed, per_level = zip(*self.rows)
    totals = [f + x * levels for f, x in zip(fixed, per_level)]
    return float(np.interp(math.log(batch), np.log(batches), totals))


NOTHING = Overhead()


class Round(NamedTuple):
  """The cost of one round."""

  parts: tuple[tuple[str, int, Cost], ...]  # (name, repetitions, cost of one)
  overhead: float  # seconds

  @classmethod
  def make(cls, parts, overhead: float) -> "Round":
    """Returns a round that takes no less time than moving its bytes.

    A fitted overhead may be negative; extrapolated, it could exceed the time of
    the passes themselves, so it is clipped.
    """
    slack = sum(n * (cost.seconds - cost.least) for _, n, cost in parts)
    return cls(parts, max(overhead, -slack))

  @property
  def seconds(self) -> float:
    return self.overhead + sum(n * cost.seconds for _, n, cost in self.parts)
