"""What a run should measure: seconds of given texts, both ways.

Inputs are a calibrated pair and what became of the draft tokens in another run.
Invariant: no time of the run that is predicted enters.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specdec.roofline import theory
from specdec.roofline.pairs import Round, TargetDraftPair
from specdec.types import Stats


@dataclasses.dataclass(frozen=True)
class Observed:
  """How draft tokens fared in some texts.

  Attributes:
    prefix_acceptance: [k] share of the rounds that kept draft tokens 1 .. i.
    wide: share of a batch's rounds that verified draft tokens at all.
    rounds: of all batches, each until its last row ended; the mean over runs.
      Rows of a batch wait for one another, and how long no curve tells: texts
      differ, and rounds of one text resemble each other.
  """

  prefix_acceptance: tuple[float, ...]
  wide: float
  rounds: float

  def __post_init__(self):
    theory.check_prefix_acceptance(self.prefix_acceptance)
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
  return Observed(
    _prefix_acceptance(*(np.sum(x, axis=0) for x in counts)), wide, rounds
  )


def _prefix_acceptance(drafted, accepted, rounds) -> tuple[float, ...]:
  """[k] from counts [k] and a number of rounds."""
  kept = accepted / np.maximum(drafted, 1)
  # Positions without room, near the end of a text, were not drafted either:
  # how often there was a draft token at all is told by the first position.
  if len(drafted):
    kept = kept * (drafted[0] / np.maximum(rounds, 1))
  return tuple(np.minimum.accumulate(np.clip(kept, 0, 1)).tolist())


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Of a setting.

  Attributes:
    round_seconds, baseline_round_seconds: one with draft tokens (of a batch's
      rounds with and without, the mean), one of autoregressive decoding.
    seconds, baseline_seconds: of the texts, each batch until its last row ends.
    speedup: their quotient.
    tokens: of a round of one row, by the prefix_acceptance curve.
    steady_speedup: by that curve, were an ended row replaced at once.
  """

  round_seconds: float
  baseline_round_seconds: float
  seconds: float
  baseline_seconds: float
  speedup: float
  tokens: float
  steady_speedup: float


def mean_round(
  pair: TargetDraftPair, batch: int, k: int, context: int, wide: float
) -> float:
  """Seconds of a round of which a share `wide` has draft tokens.

  The others run one token, as autoregressive decoding does.
  """
  full = pair.round(batch, k, context).seconds
  return wide * full + (1 - wide) * pair.baseline(batch, context).seconds


def predict(
  pair: TargetDraftPair,
  found: Observed,
  texts: int,
  batch: int,
  context: int,
  tokens: int,
) -> Prediction:
  """Texts of so many new tokens each, decoded `batch` at a time."""
  k = len(found.prefix_acceptance)
  of_round = mean_round(pair, batch, k, context, found.wide)
  baseline_round = pair.baseline(batch, context).seconds
  seconds = found.rounds * of_round
  baseline_seconds = -(-texts // batch) * tokens * baseline_round
  expected = theory.expected_tokens(found.prefix_acceptance)
  return Prediction(
    of_round,
    baseline_round,
    seconds,
    baseline_seconds,
    baseline_seconds / seconds,
    expected,
    expected * baseline_round / of_round,
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
  lines.append(_line("beside the passes", 1, "", 0, 0, 0, found.overhead))
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
