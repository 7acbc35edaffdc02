"""The best k of every batch size by the cost model, for engines.

How often draft tokens are accepted is given, or read from what was measured.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.benchmark.scenario import Scenario
from specdec.benchmark.setup import Setup
from specdec.roofline import planning
from specdec.roofline.chips import Chip


class Prices(NamedTuple):
  """What the best k of a batch is worked out from."""

  chip: Chip
  ways: int  # chips that share the target's weights
  context: int  # cached positions of a row
  prefix_acceptance: float | Sequence[float]  # one rate, or by position
  largest: int  # batch

  def schedule(self, setup: Setup, weights: str) -> list[planning.BatchRange]:
    """Returns the best k of every batch, at most the Setup's, with weights of
    a type of roofline.cost.BYTES."""
    scenario = Scenario.of(
      setup.target,
      setup.drafter,
      self.chip,
      ways=self.ways,
      most=setup.levels,
      weights=weights,
    )
    acceptance = self.prefix_acceptance
    return planning.schedule(
      scenario.pair, self.context, acceptance, setup.levels, self.largest
    )


def measured(path: str, drafter: str) -> list[float]:
  """Returns prefix acceptance from a document of bench.py or eval.py, and
  refuses other files, and what was measured with another drafter."""
  try:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    pooled = [x for x in document["runs"] if x.get("group") == "all"]
    run = max(pooled or document["runs"], key=lambda run: run["k"])
    estimates = run["acceptance"]["prefix_acceptance"]
    other = document["settings"].get("drafter")
    values = [x["value"] for x in estimates if x["value"] is not None]
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{path} is no document of bench.py or eval.py "
      f"({type(error).__name__}: {error})"
    ) from error
  if other != drafter:
    raise ValueError(f"{path} was measured with {other}, not with {drafter}")
  if not values:
    raise ValueError(f"in the runs of {path} nothing was drafted")
  # A position counts the rounds that drafted so much, which may be others.
  return np.minimum.accumulate(values).tolist()
