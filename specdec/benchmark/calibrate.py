"""Times the passes and rounds that a calibration is fitted to.

Everything is compiled first and then timed in turns, so that a machine whose
speed drifts drifts under all of them alike.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec import cache as kv
from specdec import multihost
from specdec.benchmark import timing
from specdec.benchmark.decoder import Decoder
from specdec.roofline.calibration import PassTime, RoundTime
from specdec.types import Model, PyTree

Progress = Callable[[str], None]
_KNOTS = (
  1, 2, 3, 4, 6, 8, 12, 16, 18, 24, 30, 32, 48, 64, 96, 144, 192, 256,
  384, 512, 1024,
)  # fmt: skip
_UNSEEN = ((3, 1), (1, 5), (2, 5), (1, 7), (5, 4), (3, 7), (7, 8), (11, 5))
_MOST_RUNS = 2  # of one timer in a turn
_ENOUGH = 0.02  # standard error of a time


def plan(
  batch: int, tokens: int, context: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
  """Returns (batch, tokens, context) to fit to, and others to evaluate by.

  Args:
    batch, tokens: largest ones of interest; a pass has up to their product,
      and 4 tokens at least.
    context: a usual one. Others are tried as well, to tell apart what reading
      KV costs.
  """
  points, tokens = [], max(tokens, 4)
  for many in _KNOTS:
    ways = [
      (b, many // b)
      for b in range(1, batch + 1)
      if many % b == 0 and many // b <= tokens
    ]
    if ways:
      points.append((*ways[len(ways) // 2], context))
  whole = (batch, tokens, context)
  points += [p for p in (whole, (batch, 1, 2 * context)) if p not in points]
  points.append((1, tokens, 2 * context))
  unseen = [
    (b, n, context + context // 2)
    for b, n in _UNSEEN
    if b <= batch and n <= tokens and (b, n, context) not in points
  ]
  return points, unseen


class Timer(NamedTuple):
  """What is to be timed, compiled already."""

  time: PassTime | RoundTime  # without its seconds
  run: Callable[[], float]  # returns them


def passes(
  model: Model,
  params: PyTree,
  points: Sequence[tuple[int, int, int]],
  progress: Progress = lambda _: None,
  source: int = 1,
) -> list[Timer]:
  """Compiles passes of every (batch, tokens, context), as `pass_timer` does."""
  timers = []
  for batch, tokens, slots in points:
    progress(f"compiling a pass of {batch} x {tokens}")
    shape = batch, tokens, slots // 2, slots
    time = PassTime(batch, tokens, kv.num_slots(slots), 0.0)
    timer = timing.pass_timer(model, params, *shape, source)
    timers.append(Timer(time, timer))
  return timers


def reading(params: PyTree, first: Timer) -> Timer:
  """Returns a timer of reading one byte from memory, as a pass of no tokens.

  Args:
    params: as many bytes are read.
    first: is run after it, because what follows a reading is slow.
  """
  read = timing.bandwidth_timer(params)

  def run() -> float:
    seconds = 1 / read()
    first.run()
    return seconds

  return Timer(PassTime(0, 0, 0, 0.0), run)


def rounds(
  make: Callable[[int, int], Decoder],
  rows: Sequence[Sequence[int]],
  batches: Sequence[int],
  ks: Sequence[int],
  progress: Progress = lambda _: None,
) -> list[Timer]:
  """Compiles rounds of the decoders that `make` gives for a batch and a k, and
  of each batch those of a baseline (k = 0)."""
  timers = []
  for batch, k in itertools.product(batches, ks):
    progress(f"compiling rounds, batch {batch}, k = {k}")
    decoder = make(batch, k)
    decoders = {0: decoder.baseline()} if k == ks[0] else {}
    for length, one in (decoders | {k: decoder}).items():
      time = RoundTime(batch, length, one.num_slots, 0.0)
      timers.append(Timer(time, timing.round_timer(one, rows[:batch])))
  return timers


def _schedule(sizes: Sequence[int]) -> list[int]:
  """Returns what a turn runs in order: indices of timers, groups interleaved.

  A group of few timers is run up to `_MOST_RUNS` times, spread over the turn.
  Timers are numbered one after the other, through groups of these sizes.
  """
  order, first = [], 0
  for size in sizes:
    runs = size * min(max(max(sizes) // max(size, 1), 1), _MOST_RUNS)
    order += [((i + 0.5) / runs, first + i % size) for i in range(runs)]
    first += size
  return [timer for _, timer in sorted(order)]


def in_turns(
  groups: Sequence[Sequence[Timer]],
  repeats: int,
  progress: Progress = lambda _: None,
) -> list[list]:
  """Returns the times of every group, taken in turns.

  A turn in which the machine was slow was slow for all: what its times have in
  common is taken out before the median over turns. While the standard error of
  a median exceeds 2 %, turns are added, up to twice `repeats`.
  """
  timers = [timer for group in groups for timer in group]
  schedule = np.array(_schedule([len(group) for group in groups]))
  turns: list[np.ndarray] = []
  while True:
    turn = len(turns) + 1
    total = max(repeats, turn)
    progress(f"timing passes and rounds, turn {turn} of {total}")
    logs = np.log([timers[which].run() for which in schedule])
    turns.append(np.bincount(schedule, logs) / np.bincount(schedule))
    if turn < repeats:
      continue
    middle, error = _without_drift(np.array(turns))
    # All processes take another turn, or none does.
    if multihost.agree(error.max()) <= _ENOUGH or turn >= 2 * repeats:
      break
  worst = timers[int(error.argmax())].time[:2]
  progress(f"timed within {error.max():.1%} (1 standard error; worst {worst})")
  seconds = iter(np.exp(middle).tolist())
  return [
    [timer.time._replace(seconds=next(seconds)) for timer in group]
    for group in groups
  ]


def _without_drift(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns medians [timers] of log seconds [turns, timers] less each turn's
  common deviation, and their standard errors by median absolute deviations."""
  for _ in range(10):
    middle = np.median(logs, axis=0)
    logs = logs - np.median(logs - middle, axis=1, keepdims=True)
  middle = np.median(logs, axis=0)
  deviation = 1.48 * np.median(np.abs(logs - middle), axis=0)
  return middle, 1.25 * deviation / np.sqrt(len(logs))
