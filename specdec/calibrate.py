"""Times the passes and rounds that a calibration is fitted to.

Everything is compiled first and then timed in turns, so that a machine whose
speed drifts drifts under all of them alike.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specdec import cache as kv
from specdec import measure
from specdec.analysis.calibration import PassTime, RoundTime
from specdec.session import Session
from specdec.types import Model, PyTree

Progress = Callable[[str], None]
_KNOTS = (
  1, 2, 3, 4, 6, 8, 12, 16, 18, 24, 30, 32, 48, 64, 96, 144, 192, 256,
  384, 512, 1024,
)  # fmt: skip
_UNSEEN = ((3, 1), (1, 5), (2, 5), (1, 7), (5, 4), (3, 7), (7, 8), (11, 5))


def plan(
  batch: int, tokens: int, context: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
  """(batch, tokens, context) to fit to, and others to judge the fit by.

  Args:
    batch, tokens: largest ones of interest; a pass has up to their product.
    context: a usual one. Others are tried as well, to tell apart what reading
      K/V costs.
  """
  points = []
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


def passes(
  model: Model,
  params: PyTree,
  points: Sequence[tuple[int, int, int]],
  repeats: int,
  progress: Progress = lambda _: None,
) -> list[PassTime]:
  """Median seconds of every (batch, tokens, context)."""
  timers = []
  for batch, tokens, context in points:
    progress(f"compiling a pass of {batch} x {tokens}")
    shape = batch, tokens, context // 2, context
    timers.append(measure.pass_timer(model, params, *shape))
  progress("timing passes")
  found = [[timer() for timer in timers] for _ in range(repeats)]
  medians = np.median(found, axis=0)
  return [
    PassTime(batch, tokens, kv.num_slots(context), float(seconds))
    for (batch, tokens, context), seconds in zip(points, medians)
  ]


def rounds(
  make: Callable[[int, int], Session],
  rows: Sequence[Sequence[int]],
  batches: Sequence[int],
  ks: Sequence[int],
  repeats: int,
  progress: Progress = lambda _: None,
) -> list[RoundTime]:
  """Median seconds of rounds: plain ones of each batch, and with each k.

  Args:
    make: a session for a batch and a k.
  """
  points, timers = [], []
  for batch in batches:
    plain: Session | None = None
    for k in ks:
      progress(f"compiling rounds, batch {batch}, k = {k}")
      session = make(batch, k)
      if plain is None:
        plain = session
        timers.append(measure.round_timer(session, rows[:batch], True))
        points.append((batch, 0, slots_of(session, True)))
      timers.append(measure.round_timer(session, rows[:batch], False))
      points.append((batch, k, slots_of(session, False)))
  progress("timing rounds")
  found = [[timer() for timer in timers] for _ in range(repeats)]
  medians = np.median(found, axis=0)
  return [RoundTime(*p, float(t)) for p, t in zip(points, medians)]


def slots_of(session: Session, plain: bool) -> int:
  """Positions of the target's cache, all of which attention reads."""
  return session.start([[1]], [0], plain).target_cache.num_slots
