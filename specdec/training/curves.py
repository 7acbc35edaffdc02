"""What a drafter's training bought, evaluation by evaluation.

Invariant: points come from a run's own metrics.jsonl; nothing is extrapolated.
"""

import dataclasses
import json
import math
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Curve:
  """A run's evaluations, in order.

  Attributes:
    name: of the run's folder.
    tokens: of text trained on.
    tokens_per_pass: of the target, in decoding.
    first: how often a round's first draft token was kept there.
    acceptance: the chance that a draft token drawn at temperature 1 is kept
      after the text's own words, its mean over levels.
    k: draft tokens a round.
  """

  name: str
  tokens: tuple[int, ...]
  tokens_per_pass: tuple[float, ...]
  first: tuple[float, ...]
  acceptance: tuple[float, ...]
  k: int

  @property
  def last_doubling(self) -> float | None:
    """Tokens a pass that the last doubling of tokens brought, interpolated over
    the logarithm; None: it was evaluated only later."""
    half = self.tokens[-1] / 2
    for i in range(1, len(self.tokens)):
      if self.tokens[i - 1] <= half <= self.tokens[i]:
        a, b = (math.log(self.tokens[j]) for j in (i - 1, i))
        part = (math.log(half) - a) / (b - a)
        low, high = self.tokens_per_pass[i - 1 : i + 1]
        return self.tokens_per_pass[-1] - (low + part * (high - low))
    return None


def read(folder: Path) -> Curve:
  """Of a folder of train.py or train_drafter.py, finished or not.

  Raises:
    ValueError: it is no such folder, or nothing was evaluated yet.
  """
  try:
    settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    options, decoding = settings["options"], settings["decoding"]
    each = options["batch"] * options["sequence"]
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{folder} is no run of a drafter") from error
  # A run may be writing its last line.
  entries = [json.loads(x) for x in text.splitlines() if x.endswith("}")]
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
    tuple(step * each for step in steps),
    tuple(decoded[step]["tokens_per_pass"] for step in steps),
    tuple(decoded[step]["prefix_acceptance"][0] for step in steps),
    tuple(mean_level(held_out[step]) for step in steps),
    decoding["k"],
  )
