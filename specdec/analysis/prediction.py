"""What a run should measure: seconds of given texts, both ways.

Inputs are a calibrated pair and what became of the guesses in another run.
Invariant: no time of the run that is predicted enters.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specdec.analysis import speedup
from specdec.analysis.pairs import Pair, Round
from specdec.types import Stats


@dataclasses.dataclass(frozen=True)
class Observed:
  """How guesses fared in some texts.

  Attributes:
    survival: [k] share of the rounds that kept guesses 1 .. i.
    wide: share of a batch's rounds that verified guesses at all.
    rounds: of all batches, each until its last row ended; the mean over runs.
      Rows of a batch wait for one another, and how long no curve tells: texts
      differ, and rounds of one text resemble each other.
  """

  survival: tuple[float, ...]
  wide: float
  rounds: float

  def __post_init__(self):
    speedup.check_survival(self.survival)
    if not 0 <= self.wide <= 1:
      raise ValueError(f"wide = {self.wide}; it must be in [0, 1]")
    if not 0 < self.rounds < np.inf:
      raise ValueError(f"rounds = {self.rounds}; it must be finite and > 0")


def observed(runs: Sequence[Sequence[Stats]]) -> Observed:
  """Of the same texts decoded once or several times.

  Args:
    runs: of each repetition its batches' counts, NumPy, in one order.
  """

  def column(name):
    return sum(
      np.concatenate([np.asarray(getattr(s, name), float) for s in batches])
      for batches in runs
    )

  counts = (column(name) for name in ("drafted", "accepted", "rounds"))
  widths = sum(np.asarray(s.widths, float) for run in runs for s in run)
  wide = 1.0 if len(widths) == 1 else float(1 - widths[0] / widths.sum())
  rounds = float(widths.sum()) / len(runs)
  return Observed(_survival(*(np.sum(x, axis=0) for x in counts)), wide, rounds)


def _survival(drafted, accepted, rounds) -> tuple[float, ...]:
  """[k] from counts [k] and a number of rounds."""
  kept = accepted / np.maximum(drafted, 1)
  # Positions without room, near the end of a text, were not drafted either:
  # how often there was a guess at all is told by the first position.
  if len(drafted):
    kept = kept * (drafted[0] / np.maximum(rounds, 1))
  return tuple(np.minimum.accumulate(np.clip(kept, 0, 1)).tolist())


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Of a setting.

  Attributes:
    round_seconds, plain_round_seconds: one with guesses (of a batch's rounds
      with and without, the mean), one of plain decoding.
    seconds, plain_seconds: of the texts, each batch until its last row ends.
    speedup: their quotient.
    tokens: of a round of one row, by the survival curve.
    steady_speedup: by that curve, were an ended row replaced at once.
  """

  round_seconds: float
  plain_round_seconds: float
  seconds: float
  plain_seconds: float
  speedup: float
  tokens: float
  steady_speedup: float


def mean_round(
  pair: Pair, batch: int, k: int, context: int, wide: float
) -> float:
  """Seconds of a round of which a share `wide` has guesses.

  The others run one token, as plain decoding does.
  """
  full = pair.round(batch, k, context).seconds
  return wide * full + (1 - wide) * pair.plain(batch, context).seconds


def predict(
  pair: Pair, found: Observed, texts: int, batch: int, context: int, tokens: int
) -> Prediction:
  """Texts of so many new tokens each, decoded `batch` at a time."""
  k = len(found.survival)
  of_round = mean_round(pair, batch, k, context, found.wide)
  plain_round = pair.plain(batch, context).seconds
  seconds = found.rounds * of_round
  plain_seconds = -(-texts // batch) * tokens * plain_round
  expected = speedup.expected_tokens(found.survival)
  return Prediction(
    of_round,
    plain_round,
    seconds,
    plain_seconds,
    plain_seconds / seconds,
    expected,
    expected * plain_round / of_round,
  )


def explain(found: Round) -> list[list[str]]:
  """Lines of a table: part, times, term, MB, GFLOP, MB sent, ms."""
  lines = []
  for name, times, cost in found.parts:
    lines.append(
      _line(name, times, "", cost.bytes, cost.flops, cost.sent, cost.seconds)
    )
    for term in cost.terms:
      if term.seconds or term.bytes:
        lines.append(_line("", 0, term.name, *term[1:]))
  lines.append(_line("beside the passes", 1, "", 0, 0, 0, found.beside))
  return lines


def _line(part, times, term, size, flops, sent, seconds) -> list[str]:
  def number(value, unit):
    return f"{value / unit:.3g}" if value else ""

  return [
    part,
    str(times) if times else "",
    term,
    number(size, 1e6),
    number(flops, 1e9),
    number(sent, 1e6),
    f"{round(1e3 * seconds, 6):z.4g}",  # 0 for what a fit leaves of nothing
  ]
