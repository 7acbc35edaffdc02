"""What a machine makes of the cost model, fitted to timed passes and rounds.

A pass: efficiencies, an overhead, the norm that combines moving and computing,
then a factor for how its kernels like a number of tokens. A round: what is
beside its passes. A fit of passes says how wrong it is on the points that it
saw and on others; one of rounds, where it has more rounds than numbers.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from specdec.roofline import chips
from specdec.roofline.cost import Deployment, Efficiency
from specdec.roofline.hardware import Hardware
from specdec.roofline.pairs import NOTHING, Overhead, TargetDraftPair

_FORMAT = "specdec/calibration/2"
_SHARES = ("one", "weights", "kv", "flops")


class PassTime(NamedTuple):
  """A pass that was timed."""

  batch: int
  tokens: int
  context: int  # slots that attention reads
  seconds: float


class RoundTime(NamedTuple):
  """A round of k draft tokens that was timed."""

  batch: int
  k: int
  context: int
  seconds: float


class Errors(NamedTuple):
  """Predicted over measured, less 1."""

  rms: float
  worst: float
  points: int


@dataclasses.dataclass(frozen=True)
class Fit:
  """A model's passes on one machine."""

  efficiency: Efficiency
  in_sample: Errors
  formula: Errors  # the same without the factors by tokens
  held_out: Errors
  times: tuple[PassTime, ...] = ()  # what was timed, those held out last


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
  """Of some predictions."""
  if not len(measured):
    return Errors(0.0, 0.0, 0)
  off = np.asarray(predicted) / np.asarray(measured) - 1
  worst = float(off[np.argmax(np.abs(off))])
  return Errors(float(np.sqrt(np.mean(off**2))), worst, len(off))


def predict(deployment: Deployment, point: PassTime) -> float:
  """Seconds of that pass."""
  return deployment.cost(point.batch, point.tokens, point.context).seconds


def drift(
  deployment: Deployment, then: Sequence[PassTime], now: Sequence[PassTime]
) -> float:
  """How many times as long passes take now as they took then, the median.

  Args:
    placed: as it was fitted then, for points that were not timed.
  """
  before = {point[:3]: point.seconds for point in then}
  known = [before.get(p[:3]) or predict(deployment, p) for p in now]
  return float(np.median([p.seconds / x for p, x in zip(now, known)]))


def _check_seconds(what: str, seconds: float) -> None:
  if not 0 < seconds < math.inf:
    raise ValueError(f"{what} took {seconds:g} s; it must be finite and > 0")


def fit_passes(
  deployment: Deployment,
  points: Sequence[PassTime],
  held_out: Sequence[PassTime] = (),
) -> Fit:
  """The efficiency that explains some passes of a model best.

  Args:
    placed: the model on a chip; its efficiency is not read.
    points: of one token in all, and of several, with two contexts or more.
    held_out: more, by which the fit is evaluated and not made.

  Raises:
    ValueError: there are too few points, or the time of one is not finite and
      > 0.
  """
  if len(points) < 6:
    raise ValueError(f"{len(points)} passes; a calibration needs 6 or more")
  for p in (*points, *held_out):
    _check_seconds(f"a pass of {p.batch} x {p.tokens}", p.seconds)
  measured = np.array([p.seconds for p in points])
  least = float(measured.min())

  def made(x) -> Deployment:
    shares = dict(zip(_SHARES, map(float, np.exp(x[:4]))))
    # On a CPU or GPU it is launching kernels, so layers share it.
    overhead = least * float(x[4]) / (deployment.end - deployment.start)
    chosen = Efficiency(**shares, p=1 + float(x[5]), layer_overhead=overhead)
    return dataclasses.replace(deployment, efficiency=chosen)

  usual = np.array([-0.7, -1.0, -1.5, -0.7, 0.1, 0.5])

  def residuals(x):
    model = made(x)
    off = np.log([predict(model, p) for p in points] / measured)
    return np.concatenate([off, 0.02 * (x - usual)])  # where points say nothing

  # Slightly more than the bandwidth is a cache that still holds some weights.
  low = [math.log(0.005)] * 4 + [0.0, 0.0]
  high = [math.log(1.5)] * 4 + [0.95, 8.0]
  starts = [[*usual[:5], p] for p in (0.1, 1.5)]
  found = min(
    (
      optimize.least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1
      )
      for start in starts
    ),
    key=lambda result: result.cost,
  )
  formula = made(found.x)
  rows = _factors(formula, points)
  chosen = dataclasses.replace(formula.efficiency, rows=rows)
  final = dataclasses.replace(deployment, efficiency=chosen)

  def wrong(model, some):
    return errors([predict(model, p) for p in some], [p.seconds for p in some])

  return Fit(
    chosen,
    wrong(final, points),
    wrong(formula, points),
    wrong(final, held_out),
    (*points, *held_out),
  )


def _factors(
  formula: Deployment, points: Sequence[PassTime]
) -> tuple[tuple[float, float], ...]:
  """Upon the products' time for every number of tokens that was timed.

  Where its buffers lie makes one program slower than its neighbours by a third
  at times, as long as it lives: what stands out from both is brought down to
  the nearer one.
  """
  doubled = dataclasses.replace(
    formula,
    efficiency=dataclasses.replace(formula.efficiency, rows=((1, 2.0),)),
  )
  by_tokens: dict[int, list[float]] = {}
  for point in points:
    once = predict(formula, point)
    products = predict(doubled, point) - once
    factor = (point.seconds - once + products) / products
    by_tokens.setdefault(point.batch * point.tokens, []).append(factor)
  many = sorted(by_tokens)
  found = [float(np.clip(np.median(by_tokens[m]), 0.1, 10.0)) for m in many]
  inner = [sorted(found[i : i + 3])[1] for i in range(len(found) - 2)]
  return tuple(zip(many, [found[0], *inner, found[-1]]))


@dataclasses.dataclass(frozen=True)
class RoundFit:
  """What rounds of a setting take beside their passes.

  Attributes:
    ours, plain: of speculative and of plain ones.
    errors: of all of them, whole rounds; of 0 points where there are no more
      rounds than fitted numbers.
    times: what was timed.
  """

  ours: Overhead
  baseline: Overhead
  errors: Errors
  times: tuple[RoundTime, ...] = ()


def fit_overhead(
  pair: TargetDraftPair, rounds: Sequence[RoundTime]
) -> RoundFit:
  """What its rounds take beside their passes, batch by batch.

  Args:
    rounds: of k = 0, autoregressive decoding, and of others, two or more of a
      batch to tell what a draft pass adds.

  Raises:
    ValueError: the time of a round is not finite and > 0.
  """
  for r in rounds:
    _check_seconds(f"a round of batch {r.batch}, k = {r.k}", r.seconds)
  pair = dataclasses.replace(pair, overhead=NOTHING, baseline_overhead=NOTHING)

  def fit(some: list[RoundTime]) -> Overhead:
    by_batch: dict[int, list[tuple[int, float, float]]] = {}
    for r in some:
      passes = pair.round(r.batch, r.k, r.context).seconds
      by_batch.setdefault(r.batch, []).append((r.k, passes, r.seconds))
    rows = []
    for batch, found in sorted(by_batch.items()):
      k, passes, seconds = np.array(sorted(found)).T
      left, weight = seconds - passes, 1 / seconds  # relative errors count
      slope = 0.0
      if k[0] < k[-1]:
        slope, _ = np.polyfit(k, left, 1, w=weight)
        # Of all these rounds the longest draft does not take the least time.
        slope = max(slope, (passes[0] - passes[-1]) / (k[-1] - k[0]))
      fixed = np.average(left - slope * k, weights=weight**2)
      rows.append((batch, float(fixed), float(slope)))
    return Overhead(tuple(rows))

  baseline = fit([r for r in rounds if not r.k])
  ours = fit([r for r in rounds if r.k])
  final = dataclasses.replace(pair, overhead=ours, baseline_overhead=baseline)
  spare = len(rounds) - len(baseline.rows)
  for batch, *_ in ours.rows:  # a line of two numbers, or one
    spare -= min(2, len({r.k for r in rounds if r.k and r.batch == batch}))
  evaluated = rounds if spare > 0 else ()  # else it says nothing
  predicted = [final.round(r.batch, r.k, r.context).seconds for r in evaluated]
  wrong = errors(predicted, [r.seconds for r in evaluated])
  return RoundFit(ours, baseline, wrong, tuple(rounds))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """A machine, and what was fitted on it.

  Attributes:
    fits: by model.
    beside: by setting (models, drafter, rule, whether it samples).
  """

  hardware: Hardware
  fits: dict[str, Fit] = dataclasses.field(default_factory=dict)
  overhead: dict[str, RoundFit] = dataclasses.field(default_factory=dict)

  def place(self, name: str, deployment: Deployment) -> Deployment:
    """A model on this machine, as efficient as it was found to be.

    Raises:
      ValueError: that model was never timed.
    """
    if name not in self.fits:
      raise ValueError(
        f"this calibration has no {name!r}; it has: {', '.join(self.fits)}"
      )
    chip = chips.of_hardware(self.hardware)
    fit = self.fits[name]
    return dataclasses.replace(deployment, chip=chip, efficiency=fit.efficiency)

  def to_json(self) -> str:
    """The text that `from_json` reads."""
    document = {"format": _FORMAT, **dataclasses.asdict(self)}
    for fit in document["fits"].values():
      if math.isinf(fit["efficiency"]["p"]):
        fit["efficiency"]["p"] = None
    return json.dumps(document, indent=1, allow_nan=False) + "\n"

  @classmethod
  def from_json(cls, text: str) -> "Calibration":
    """An equal one.

    Raises:
      ValueError: the text is anything else.
    """
    try:
      document = json.loads(text)
      if document.pop("format") != _FORMAT:
        raise ValueError("not the text of a calibration")
      return cls(
        Hardware.from_json(json.dumps(document["hardware"])),
        {name: _fit(found) for name, found in document["fits"].items()},
        {name: _overhead(one) for name, one in document["overhead"].items()},
      )
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(f"not the text of a calibration: {error}") from error


def _fit(document: dict) -> Fit:
  found = dict(document["efficiency"])
  found["rows"] = tuple((m, factor) for m, factor in found["rows"])
  found["p"] = math.inf if found["p"] is None else found["p"]
  told = {
    name: Errors(*document[name])
    for name in ("in_sample", "formula", "held_out")
  }
  times = tuple(PassTime(*time) for time in document["times"])
  return Fit(Efficiency(**found), **told, times=times)


def _overhead(document: dict) -> RoundFit:
  pair = (
    Overhead(tuple(map(tuple, document[name]["rows"])))
    for name in ("ours", "baseline")
  )
  times = tuple(RoundTime(*time) for time in document["times"])
  return RoundFit(*pair, Errors(*document["errors"]), times)
