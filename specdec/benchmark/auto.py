"""Chooses k by what rounds cost and how first draft tokens fare, or lets the
loop choose it by what rounds cost."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec import draft_length, draft_shape, multihost
from specdec.benchmark import calibrated, deployments, provenance
from specdec.benchmark.batches import prompt_size
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.roofline import hardware, planning, prediction
from specdec.roofline.calibration import Calibration
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import Outcomes, Stats
from specdec.utils import files, terminal

_TURNS = 7  # of timing, or twice as many on a noisy machine


class Choice(NamedTuple):
  """A k, and why."""

  k: int
  speedup: float
  estimates: list[planning.Point]
  prefix_acceptance: tuple[float, ...]
  pair: TargetDraftPair
  context: int


def choose(
  setup: Setup,
  target: Target,
  rows: Sequence[Sequence[int]],
  most_k: int,
  calibration: str | None = None,
  batches: Sequence[int] = (),
) -> Choice:
  """Returns the k <= most_k, 0 included, that should decode rows fastest.

  The rounds that acceptance is learnt from have noise of their own (rule 7).

  Args:
    rows: prompts, one batch of them.
    calibration: a file of `calibrated.write`; what it lacks is timed first, and
      kept. Default: one for each machine, in ~/.cache/specdec/calibration.
    batches: others that will be asked for, timed together with the setup's.
  """
  setup, pair, scale = _priced(
    setup, target, rows, most_k, calibration, batches
  )
  slots, stats, _ = _tried(setup, target, rows)
  seen = prediction.observed([[stats]])
  points = planning.sweep_k(
    *(pair, setup.batch, slots, seen.prefix_acceptance, most_k, seen.wide),
    scale=scale,
  )
  # A round that drafts moves what one without drafts does: of a noisy fit an
  # overhead below 0 must not say otherwise.
  least = points[0].seconds
  for k, point in enumerate(points):
    if point.seconds < least:
      points[k] = point._replace(seconds=least, speedup=point.tokens)
  best = max(points, key=lambda point: point.speedup)
  k, speedup = map(float, multihost.agree([best.k, best.speedup]))
  return Choice(int(k), speedup, points, seen.prefix_acceptance, pair, slots)


def adaptive(
  setup: Setup,
  target: Target,
  rows: Sequence[Sequence[int]],
  most_k: int,
  calibration: str | None = None,
  batches: Sequence[int] = (),
) -> Setup:
  """Returns the setup whose rounds draft 0 to most_k tokens, as it pays.

  Arguments as of `choose`. What is expected before a batch has outcomes is
  learnt from rounds with noise of their own, too.
  """
  sized, pair, scale = _priced(
    setup, target, rows, most_k, calibration, batches
  )
  context = sized.max_length(target.checkpoint.config)
  widths = draft_shape.step_widths(most_k)
  costs = planning.step_costs(pair, setup.batch, context, widths, scale)
  costs = *costs, scale[0] * pair.catch_up(setup.batch, context)
  *levels, catch_up = (cost / costs[0] for cost in costs)
  always = f"adaptive(costs={[1] * (most_k + 1)})"
  always = dataclasses.replace(sized, k=most_k, shape=always)
  _, _, outcomes = _tried(always, target, rows)
  rates = draft_length.rates_of(outcomes)
  arguments = {"costs": levels, "catch_up": catch_up, **rates._asdict()}
  shape = ", ".join(f"{x}={_agreed(y)}" for x, y in arguments.items())
  return dataclasses.replace(setup, k=most_k, shape=f"adaptive({shape})")


def _agreed(numbers: float | Sequence[float]) -> str:
  """Formats a number or a list of them, the same on every process."""
  numbers = multihost.agree(numbers)
  texts = [f"{x:.4g}" for x in numbers.ravel()]
  return f"[{', '.join(texts)}]" if numbers.ndim else texts[0]


def pilot_rounds(batch: int) -> int:
  """Returns how many rounds acceptance is learnt from."""
  return max(16, 64 // batch)


def _tried(
  setup: Setup, target: Target, rows: Sequence[Sequence[int]]
) -> tuple[int, Stats, Outcomes | None]:
  """Decodes some rounds with noise of their own.

  Returns:
    Slots of the decoder's cache, and counts and outcomes of the draft tokens.
  """
  decoder = calibrated.pilot(setup, target)
  rounds = pilot_rounds(setup.batch)
  what = f"compiling k = {setup.k} and trying it for {rounds} rounds"
  with terminal.progress(what):
    return decoder.num_slots, *decoder.first_rounds(rows, rounds)


def _priced(
  setup: Setup,
  target: Target,
  rows: Sequence[Sequence[int]],
  most_k: int,
  calibration: str | None,
  batches: Sequence[int],
) -> tuple[Setup, TargetDraftPair, np.ndarray]:
  """Returns the setup with the largest k, what its models cost here, and what
  its rounds of 0 to most_k tokens took, times that."""
  setup = dataclasses.replace(setup, k=most_k, prompt_size=prompt_size(rows))
  calibrated.check(setup)
  folder = Path("~/.cache/specdec/calibration").expanduser()
  path = Path(calibration or folder / f"{hardware.fingerprint()}.json")
  timed = _timed(setup, target, rows, path, sorted({setup.batch, *batches}))
  pair = deployments.pair_of(setup, target, timed)
  fit = timed.overhead[deployments.setting_of(setup)]
  return setup, pair, fit.scale(pair, setup.batch, most_k)


def _timed(
  setup: Setup, target: Target, rows, path: Path, batches: Sequence[int]
) -> Calibration:
  """Reads a file, and times what it lacks of these batches."""
  base, most_k = calibrated.read(path), setup.levels
  ks = calibrated.step_ks(most_k)
  absent = [
    batch
    for batch in batches
    if not (base and calibrated.covers(setup, target, base, batch, most_k, ks))
  ]
  if not absent:
    return base
  with files.naming_errors(path):  # before what takes minutes
    path.parent.mkdir(parents=True, exist_ok=True)
  busy = provenance.busy_cores(0.5)
  if busy is not None and busy > provenance.QUIET:
    terminal.report(
      f"warning: others keep {busy:.1f} cores busy; what rounds cost is timed "
      f"all the same and kept: delete {path} to have it timed anew"
    )
  with terminal.progress(f"timing this machine, once (kept in {path})"):
    calibration = calibrated.timed(
      setup,
      target,
      (list(rows) * max(absent))[: max(absent)],
      absent,
      ks,
      setup.max_length(target.checkpoint.config),
      base,
      _TURNS,
    )
  calibrated.add(path, calibration, base)
  return calibration
