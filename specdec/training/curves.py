"""Reads the learning curve of a drafter's training run.

Invariant: points come from the run's metrics.jsonl; nothing is extrapolated.
"""

import dataclasses
import json
import math
from pathlib import Path

from specdec.utils import files


@dataclasses.dataclass(frozen=True)
class Curve:
  """The evaluations of a run, in order of steps.

  Attributes:
    name: of the run's folder.
    tokens: tokens of text trained on.
    tokens_per_pass: mean acceptance length in decoding.
    first: acceptance rate of the first draft token of a round, in decoding.
    acceptance: teacher-forced acceptance probability of a draft token sampled
      at temperature 1, averaged over levels.
    k: draft tokens in each round.
  """

  name: str
  tokens: tuple[int, ...]
  tokens_per_pass: tuple[float, ...]
  first: tuple[float, ...]
  acceptance: tuple[float, ...]
  k: int

  @property
  def last_doubling(self) -> float | None:
    """Gain in tokens_per_pass from the last doubling of training tokens.

    Interpolates linearly in the logarithm of tokens. None: the first evaluation
    came after half of the tokens.
    """
    half = self.tokens[-1] / 2
    for i in range(1, len(self.tokens)):
      if self.tokens[i - 1] <= half <= self.tokens[i]:
        a, b = (math.log(self.tokens[j]) for j in (i - 1, i))
        weight = (math.log(half) - a) / (b - a)
        low, high = self.tokens_per_pass[i - 1 : i + 1]
        return self.tokens_per_pass[-1] - (low + weight * (high - low))
    return None


def read(folder: Path) -> Curve:
  """Reads a folder of train.py or train_drafter.py, finished or not.

  Raises:
    ValueError: it is not such a folder, or has no evaluation yet.
  """
  try:
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    entries = files.read_json_lines(folder / "metrics.jsonl")
    options, decoding = settings["options"], settings["decoding"]
    tokens_per_step = options["batch"] * options["sequence"]
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{folder} is not a run of a drafter") from error
  held_out = {x["step"]: x for x in entries if x["kind"] == "held_out"}
  decoded = {x["step"]: x for x in entries if x["kind"] == "decoding"}
  steps = sorted(held_out.keys() & decoded.keys())
  if not steps:
    raise ValueError(f"{folder} has no evaluation yet")

  def mean_level(entry):
    levels = [v for k, v in entry.items() if k.startswith("acceptance")]
    return sum(levels) / len(levels)

  return Curve(
    folder.name,
    tuple(step * tokens_per_step for step in steps),
    tuple(decoded[step]["tokens_per_pass"] for step in steps),
    tuple(decoded[step]["prefix_acceptance"][0] for step in steps),
    tuple(mean_level(held_out[step]) for step in steps),
    decoding["k"],
  )
