"""Predicts the seconds of a run, speculative and baseline.

Inputs are a calibrated pair and the acceptance observed in another run.
Invariant: no timing of the predicted run enters its prediction.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specdec.roofline import planning, theory
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import Stats


@dataclasses.dataclass(frozen=True)
class Observed:
  """Acceptance observed in some texts."""

  prefix_acceptance: tuple[float, ...]  # share of rounds that accepted 1..i
  wide: float  # share of rounds in which the batch verified draft tokens
  # Rounds over batches, each until its last row ended; mean over runs. They are
  # observed, not derived from the curve: rows wait for the slowest row of their
  # batch, texts differ, and rounds of one text are correlated.
  rounds: float
  # Rounds of autoregressive decoding for the same texts; None: all texts have
  # the length that was asked for.
  baseline_rounds: float | None = None

  def __post_init__(self):
    theory.check_prefix_acceptance(self.prefix_acceptance)
    if not 0 <= self.wide <= 1:
      raise ValueError(f"wide = {self.wide}; it must be in [0, 1]")
    if not 0 < self.rounds < np.inf:
      raise ValueError(f"rounds = {self.rounds}; it must be finite and > 0")


def observed(runs: Sequence[Sequence[Stats]]) -> Observed:
  """Summarises the counts of the same texts, decoded once or several times.

  Args:
    runs: for each repetition the Stats (NumPy) of its batches.
  """
  batches = [stats for run in runs for stats in run]
  drafted, accepted, rounds = (
    sum(np.sum(np.asarray(getattr(s, name), float), axis=0) for s in batches)
    for name in ("drafted", "accepted", "rounds")
  )
  rates = accepted / np.maximum(drafted, 1)
  # Deep positions are also undrafted for lack of room near the end of a text,
  # so the first position decides how often a round had a draft.
  if len(drafted):
    rates = rates * (drafted[0] / np.maximum(rounds, 1))
  widths = sum(np.asarray(s.widths, float) for s in batches)
  return Observed(
    tuple(np.minimum.accumulate(np.clip(rates, 0, 1)).tolist()),
    1.0 if len(widths) == 1 else float(1 - widths[0] / widths.sum()),
    float(widths.sum()) / len(runs),
    float(sum(np.max(s.emitted) for s in batches)) / len(runs),
  )


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The prediction for one setting."""

  round_seconds: float  # mean over rounds with and without draft tokens
  baseline_round_seconds: float
  seconds: float  # of all texts, each batch until its last row ends
  baseline_seconds: float
  speedup: float  # baseline_seconds / seconds
  tokens: float  # per round and row, by the prefix acceptance curve
  steady_speedup: float  # by that curve, if finished rows were replaced at once
  cost: float  # c: time of drafting a token over that of a target pass for one


def predict(
  pair: TargetDraftPair,
  observation: Observed,
  texts: int,
  batch: int,
  context: int,
  tokens: int,
) -> Prediction:
  """Predicts `texts` texts of at most `tokens` new tokens, in batches."""
  rates, wide = observation.prefix_acceptance, observation.wide
  levels = len(rates)
  points = planning.sweep_k(pair, batch, context, rates, levels, wide)
  baseline, ours = points[0].seconds, points[-1]
  seconds = observation.rounds * ours.seconds
  baseline_rounds = observation.baseline_rounds
  if baseline_rounds is None:
    baseline_rounds = -(-texts // batch) * tokens
  baseline_seconds = baseline_rounds * baseline
  drafted = pair.round(batch, levels, context)
  drafted = drafted.only("draft", "first layers", "update")
  one = pair.round(batch, 0, context).only("target")
  return Prediction(
    round_seconds=ours.seconds,
    baseline_round_seconds=baseline,
    seconds=seconds,
    baseline_seconds=baseline_seconds,
    speedup=baseline_seconds / seconds,
    tokens=ours.tokens,
    steady_speedup=ours.speedup,
    cost=drafted.seconds / max(levels, 1) / one.seconds,
  )
