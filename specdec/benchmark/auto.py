"""Chooses k: by what rounds cost, and by how first draft tokens fare."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec import multihost
from specdec.benchmark import calibrated
from specdec.benchmark.catalog import Target
from specdec.benchmark.decoder import prompt_size
from specdec.benchmark.setup import Setup
from specdec.roofline import hardware, prediction, theory
from specdec.roofline.calibration import Calibration
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import terminal

_ROUNDS = 16  # from which acceptance is learnt


class Estimate(NamedTuple):
  """What is expected of one k."""

  k: int
  tokens: float  # per round and row
  seconds: float  # of a round
  rate: float  # tokens per second of the batch
  speedup: float


class Choice(NamedTuple):
  """A k, and why."""

  k: int
  speedup: float
  estimates: list[Estimate]
  prefix_acceptance: tuple[float, ...]
  pair: TargetDraftPair
  context: int

  @property
  def summary(self) -> str:
    """The speedup that is expected, and the k."""
    return f"{self.speedup:.2f} x, k = {self.k}"


def choose(
  setup: Setup,
  target: Target,
  rows: Sequence[Sequence[int]],
  most_k: int,
  calibration: str | None = None,
) -> Choice:
  """Returns the k <= most_k, 0 included, that should decode rows fastest.

  The rounds that acceptance is learnt from have noise of their own (rule 7).

  Args:
    rows: prompts, one batch of them.
    calibration: a file of `calibrated.write`; what it lacks is timed first, and
      kept. Default: one for each machine, in ~/.cache/specdec/calibration.
  """
  setup = dataclasses.replace(setup, k=most_k, prompt_size=prompt_size(rows))
  pair = calibrated.pair_of(
    setup, target, _calibration(setup, target, rows, calibration)
  )
  decoder, batch = calibrated.pilot(setup, target), setup.batch
  slots = decoder.num_slots
  what = f"compiling k = {most_k} and trying it for {_ROUNDS} rounds"
  with terminal.progress(what):
    seen = prediction.observed([[decoder.first_rounds(rows, _ROUNDS)]])
  baseline = pair.baseline(batch, slots).seconds
  best, gain, estimates = 0, 1.0, []
  for k in range(most_k + 1):
    tokens = theory.expected_tokens(seen.prefix_acceptance[:k])
    seconds = baseline
    if k:
      seconds = prediction.mean_round(pair, batch, k, slots, seen.wide)
      # A round that drafts moves what one without drafts does: of a noisy fit
      # an overhead below 0 must not say otherwise.
      seconds = max(seconds, baseline)
    faster = tokens * baseline / seconds
    if faster > gain:
      best, gain = k, faster
    rate = batch * tokens / seconds
    estimates.append(Estimate(k, tokens, seconds, rate, faster))
  best, gain = map(float, multihost.agree([best, gain]))
  acceptance = seen.prefix_acceptance
  return Choice(int(best), gain, estimates, acceptance, pair, slots)


def _calibration(
  setup: Setup, target: Target, rows, path: str | None
) -> Calibration:
  """Reads the file, and times what it lacks."""
  calibrated.check(setup)
  folder = Path("~/.cache/specdec/calibration").expanduser()
  place = Path(path or folder / f"{hardware.fingerprint()}.json")
  base = calibrated.read(place)
  batch, most_k = setup.batch, setup.levels
  if base and calibrated.covers(setup, target, base, batch, most_k):
    return base
  many = (list(rows) * batch)[:batch]
  what = f"timing this machine for --k=auto (kept in {place})"
  with terminal.progress(what):
    calibration = calibrated.timed(
      setup,
      target,
      many,
      (batch,),
      sorted({1, most_k}),
      setup.prompt_size + setup.max_new_tokens,
      base,
    )
  place.parent.mkdir(parents=True, exist_ok=True)
  calibrated.write(place, calibration)
  return calibration
