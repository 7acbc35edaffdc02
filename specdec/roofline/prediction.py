"""Predicts the seconds of a run, speculative and baseline.

Inputs are a calibrated pair and the acceptance observed in another run.
Invariant: no timing of the predicted run enters its prediction.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specdec.roofline import theory
from specdec.roofline.pairs import TargetDraftPair
from specdec.roofline.round_cost import Round
from specdec.types import Stats


@dataclasses.dataclass(frozen=True)
class Observed:
  """Acceptance observed in some texts.

  Attributes:
    prefix_acceptance: [k] share of rounds that accepted draft tokens 1..i.
    wide: share of rounds in which the batch verified draft tokens at all.
    rounds: summed over batches, each until its last row ended; mean over runs.
      It is observed, not derived from the curve: rows wait for the slowest row
      of their batch, texts differ, and rounds of one text are correlated.
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
  """Summarises the counts of the same texts, decoded once or several times.

  Args:
    runs: for each repetition the Stats (NumPy) of its batches, in one order.
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
  """Returns the curve [k] from counts [k] and a number of rounds."""
  rates = accepted / np.maximum(drafted, 1)
  # Deep positions are also undrafted for lack of room near the end of a text,
  # so the first position decides how often a round had a draft.
  if len(drafted):
    rates = rates * (drafted[0] / np.maximum(rounds, 1))
  return tuple(np.minimum.accumulate(np.clip(rates, 0, 1)).tolist())


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The prediction for one setting.

  Attributes:
    round_seconds: mean over rounds with and without draft tokens.
    baseline_round_seconds: of a round of autoregressive decoding.
    seconds, baseline_seconds: of all texts, each batch until its last row ends.
    speedup: baseline_seconds / seconds.
    tokens: per round and row, by the prefix acceptance curve.
    steady_speedup: by that curve, if a finished row were replaced at once.
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
  """Returns mean seconds of a round if a share `wide` has draft tokens.

  The other rounds run one token a row, as the baseline does.
  """
  full = pair.round(batch, k, context).seconds
  return wide * full + (1 - wide) * pair.baseline(batch, context).seconds


def predict(
  pair: TargetDraftPair,
  observation: Observed,
  texts: int,
  batch: int,
  context: int,
  tokens: int,
) -> Prediction:
  """Predicts `texts` texts of `tokens` new tokens each, in batches."""
  k = len(observation.prefix_acceptance)
  round_seconds = mean_round(pair, batch, k, context, observation.wide)
  baseline_round = pair.baseline(batch, context).seconds
  seconds = observation.rounds * round_seconds
  baseline_seconds = -(-texts // batch) * tokens * baseline_round
  expected = theory.expected_tokens(observation.prefix_acceptance)
  return Prediction(
    round_seconds,
    baseline_round,
    seconds,
    baseline_seconds,
    baseline_seconds / seconds,
    expected,
    expected * baseline_round / round_seconds,
  )


def explain(cost_of_round: Round) -> list[list[str]]:
  """Returns table rows: part, times, term, MB, GFLOP, MB sent, ms."""
  lines = []
  for name, times, cost in cost_of_round.parts:
    lines.append(
      _line(name, times, "", cost.bytes, cost.flops, cost.sent, cost.seconds)
    )
    for term in cost.terms:
      if term.seconds or term.bytes:
        lines.append(_line("", 0, term.name, *term[1:]))
  overhead = cost_of_round.overhead
  lines.append(_line("round overhead", 1, "", 0, 0, 0, overhead))
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
    f"{round(1e3 * seconds, 6):z.4g}",  # rounding noise of a fit prints as 0
  ]
