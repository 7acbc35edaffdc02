"""Fits the cost model to timed passes and rounds of one machine.

For passes: efficiencies, an overhead per layer, the exponent of the norm that
combines memory and compute, then a factor per number of tokens. For rounds: the
overhead beyond their passes. A fit of passes reports its errors in sample and
held out; a fit of rounds in sample, where rounds outnumber parameters.
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
from specdec.roofline.round_cost import NOTHING, Overhead, TargetDraftPair

_FORMAT = "specdec/calibration/3"
# Where a format keeps overheads; version 0.1.0 wrote the older one.
_OVERHEAD = {_FORMAT: "overhead", "specdec/calibration/2": "beside"}
_CACHED = 32 << 20  # bytes of a set that main memory has no part in, roughly
_SHARES = ("one", "weights", "kv", "flops")


class PassTime(NamedTuple):
  """A timed pass."""

  batch: int
  tokens: int
  context: int  # cache slots that attention reads
  seconds: float


class RoundTime(NamedTuple):
  """A timed round of k draft tokens."""

  batch: int
  k: int
  context: int
  seconds: float


class Errors(NamedTuple):
  """Relative errors: predicted / measured - 1."""

  rms: float
  worst: float
  points: int


@dataclasses.dataclass(frozen=True)
class Fit:
  """The fit of a model's passes on one machine."""

  efficiency: Efficiency
  in_sample: Errors
  formula: Errors  # in sample, without the factors per number of tokens
  held_out: Errors
  times: tuple[PassTime, ...] = ()  # all timings, held-out ones last


def errors(predicted: Sequence[float], measured: Sequence[float]) -> Errors:
  """Returns the errors of predictions."""
  if not measured:
    return Errors(0.0, 0.0, 0)
  relative = np.asarray(predicted) / np.asarray(measured) - 1
  worst = float(relative[np.argmax(np.abs(relative))])
  return Errors(float(np.sqrt(np.mean(relative**2))), worst, len(relative))


def predict(deployment: Deployment, point: PassTime) -> float:
  """Returns the predicted seconds of a pass."""
  return deployment.cost(point.batch, point.tokens, point.context).seconds


def drift(
  deployment: Deployment, then: Sequence[PassTime], now: Sequence[PassTime]
) -> float:
  """Returns the median ratio of pass times now to those at calibration.

  Args:
    deployment: as fitted then; predicts points that were not timed then.
  """
  before = {point[:3]: point.seconds for point in then}
  expected = [before.get(p[:3]) or predict(deployment, p) for p in now]
  return float(np.median([p.seconds / x for p, x in zip(now, expected)]))


def _check_seconds(name: str, seconds: float) -> None:
  if not 0 < seconds < math.inf:
    raise ValueError(f"{name} took {seconds:g} s; it must be finite and > 0")


def fit_passes(
  deployment: Deployment,
  points: Sequence[PassTime],
  held_out: Sequence[PassTime] = (),
) -> Fit:
  """Fits the efficiency of a model's passes.

  Robust least squares on log time, with a weak prior for parameters that the
  points do not determine.

  Args:
    deployment: the model on a chip; its efficiency is ignored.
    points: passes of one token and of several, at two contexts or more.
    held_out: passes to evaluate the fit on.

  Raises:
    ValueError: there are fewer than 6 points, or a time is not finite and > 0.
  """
  if len(points) < 6:
    raise ValueError(f"{len(points)} passes; a calibration needs 6 or more")
  for p in (*points, *held_out):
    _check_seconds(f"a pass of {p.batch} x {p.tokens}", p.seconds)
  measured = np.array([p.seconds for p in points])
  least = float(measured.min())

  def with_parameters(x) -> Deployment:
    shares = dict(zip(_SHARES, map(float, np.exp(x[:4]))))
    # On CPUs and GPUs overhead is kernel launches, so it scales with layers.
    overhead = least * float(x[4]) / (deployment.end - deployment.start)
    fitted = Efficiency(**shares, p=1 + float(x[5]), layer_overhead=overhead)
    return dataclasses.replace(deployment, efficiency=fitted)

  prior = np.array([-0.7, -1.0, -1.5, -0.7, 0.1, 0.5])

  def residuals(x):
    model = with_parameters(x)
    log_ratio = np.log([predict(model, p) for p in points] / measured)
    return np.concatenate([log_ratio, 0.02 * (x - prior)])

  # A share above 1: the cache still holds some of the weights.
  low = [math.log(0.005)] * 4 + [0.0, 0.0]
  high = [math.log(1.5)] * 4 + [0.95, 8.0]
  starts = [[*prior[:5], p] for p in (0.1, 1.5)]
  options = {"bounds": (low, high), "loss": "soft_l1", "f_scale": 0.1}
  solutions = [optimize.least_squares(residuals, x, **options) for x in starts]
  solution = min(solutions, key=lambda result: result.cost)
  formula = with_parameters(solution.x)
  rows = _factors(formula, points)
  efficiency = dataclasses.replace(formula.efficiency, rows=rows)
  final = dataclasses.replace(deployment, efficiency=efficiency)

  residual_errors = (
    errors([predict(model, p) for p in passes], [p.seconds for p in passes])
    for model, passes in ((final, points), (formula, points), (final, held_out))
  )
  return Fit(efficiency, *residual_errors, (*points, *held_out))


def _factors(
  formula: Deployment, points: Sequence[PassTime]
) -> tuple[tuple[float, float], ...]:
  """Fits the factor on the products' time per timed number of tokens.

  Takes a running median of three: depending on where its buffers lie, one
  compiled program can be a third slower than its neighbours for its lifetime.
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
  counts = sorted(by_tokens)
  raw = [float(np.clip(np.median(by_tokens[m]), 0.1, 10.0)) for m in counts]
  inner = [sorted(raw[i : i + 3])[1] for i in range(len(raw) - 2)]
  return tuple(zip(counts, [raw[0], *inner, raw[-1]]))


@dataclasses.dataclass(frozen=True)
class RoundFit:
  """The overhead of a setting's rounds beyond their passes.

  Attributes:
    ours, baseline: of speculative and of baseline rounds.
    errors: of whole rounds, in sample; 0 points where rounds do not outnumber
      the fitted parameters.
    times: the timed rounds.
  """

  ours: Overhead
  baseline: Overhead
  errors: Errors
  times: tuple[RoundTime, ...] = ()

  def scale(self, pair: TargetDraftPair, batch: int, most: int) -> np.ndarray:
    """Returns [most + 1] what rounds of k = 0 .. most took, times the model's.

    Of batches at most twice or half as large the one whose drafts come nearest
    to `most`, then the nearest; and of the next k that was timed. A pass's time
    jumps where other products take over, which no line in k can say: until they
    are timed, more tokens count as being past the jump.

    Args:
      pair: with this overhead.
    """
    ratios: dict[int, dict[int, float]] = {}
    for r in self.times:
      expected = pair.round(r.batch, r.k, r.context).seconds
      ratios.setdefault(r.batch, {})[r.k] = r.seconds / expected

    def preference(timed: int):
      distance = abs(math.log(timed / batch))
      return distance > math.log(2), -min(most, max(ratios[timed])), distance

    ratio = ratios[min(ratios, key=preference)]
    ks = sorted(ratio)
    places = np.searchsorted(ks, np.arange(most + 1)).clip(max=len(ks) - 1)
    return np.array([ratio[ks[place]] for place in places])


def fit_overhead(
  pair: TargetDraftPair, rounds: Sequence[RoundTime]
) -> RoundFit:
  """Fits the overhead of rounds, linear in k, batch by batch.

  Args:
    rounds: baseline rounds (k = 0) and speculative ones; two values of k per
      batch determine the overhead per draft pass.

  Raises:
    ValueError: the time of a round is not finite and > 0.
  """
  for r in rounds:
    _check_seconds(f"a round of batch {r.batch}, k = {r.k}", r.seconds)
  pair = dataclasses.replace(pair, overhead=NOTHING, baseline_overhead=NOTHING)

  def fit(times: list[RoundTime]) -> Overhead:
    by_batch: dict[int, list[tuple[int, float, float]]] = {}
    for r in times:
      passes = pair.round(r.batch, r.k, r.context).seconds
      by_batch.setdefault(r.batch, []).append((r.k, passes, r.seconds))
    rows = []
    for batch, points in sorted(by_batch.items()):
      k, passes, seconds = np.array(sorted(points)).T
      excess, weight = seconds - passes, 1 / seconds  # relative errors count
      slope = 0.0
      if k[0] < k[-1]:
        slope, _ = np.polyfit(k, excess, 1, w=weight)
        # Keeps the longest draft's round no faster than the shortest one's.
        slope = max(slope, (passes[0] - passes[-1]) / (k[-1] - k[0]))
      fixed = np.average(excess - slope * k, weights=weight**2)
      rows.append((batch, float(fixed), float(slope)))
    return Overhead(tuple(rows))

  baseline = fit([r for r in rounds if not r.k])
  ours = fit([r for r in rounds if r.k])
  final = dataclasses.replace(pair, overhead=ours, baseline_overhead=baseline)
  freedom = len(rounds) - len(baseline.rows)
  for batch, *_ in ours.rows:  # a line has two parameters, a point one
    freedom -= min(2, len({r.k for r in rounds if r.k and r.batch == batch}))
  evaluated = rounds if freedom > 0 else ()
  predicted = [final.round(r.batch, r.k, r.context).seconds for r in evaluated]
  residual = errors(predicted, [r.seconds for r in evaluated])
  return RoundFit(ours, baseline, residual, tuple(rounds))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """A machine's rates and the fits to its times."""

  hardware: Hardware
  fits: dict[str, Fit] = dataclasses.field(default_factory=dict)  # by model
  # By setting: models, drafter, rule, sampled or greedy.
  overhead: dict[str, RoundFit] = dataclasses.field(default_factory=dict)
  # By target: B/s at which as much as its weights was read in the same turns.
  bandwidth: dict[str, float] = dataclasses.field(default_factory=dict)

  def place(
    self, name: str, deployment: Deployment, bandwidth_ratio: float = 1.0
  ) -> Deployment:
    """Returns a deployment on this machine with its fitted efficiency.

    Args:
      bandwidth_ratio: of the main memory, now over at calibration.

    Raises:
      ValueError: there is no fit of that model.
    """
    if name not in self.fits:
      raise ValueError(
        f"this calibration has no {name!r}; it has: {', '.join(self.fits)}"
      )
    chip = chips.of_hardware(self.hardware)
    # What fits the caches of a core is not read from there.
    caches = tuple(
      (size, rate * (bandwidth_ratio if size > _CACHED else 1.0))
      for size, rate in chip.caches
    )
    chip = dataclasses.replace(
      chip, bandwidth=chip.bandwidth * bandwidth_ratio, caches=caches
    )
    fit = self.fits[name]
    return dataclasses.replace(deployment, chip=chip, efficiency=fit.efficiency)

  def to_json(self) -> str:
    """Serialises the calibration; `from_json` is the inverse."""
    document = {"format": _FORMAT, **dataclasses.asdict(self)}
    for fit in document["fits"].values():
      if math.isinf(fit["efficiency"]["p"]):
        fit["efficiency"]["p"] = None
    return json.dumps(document, indent=1, allow_nan=False) + "\n"

  @classmethod
  def from_json(cls, text: str) -> "Calibration":
    """Parses the text of `to_json`.

    Raises:
      ValueError: the text was not written by `to_json`.
    """
    try:
      document = json.loads(text)
      file_format = document["format"]
      if file_format not in _OVERHEAD:
        raise ValueError("not the text of a calibration")
      fits, overhead = document["fits"], document[_OVERHEAD[file_format]]
      return cls(
        Hardware.from_json(json.dumps(document["hardware"])),
        {name: _fit(entry) for name, entry in fits.items()},
        {setting: _overhead(entry) for setting, entry in overhead.items()},
        {
          name: _row((rate,))[0]
          for name, rate in document.get("bandwidth", {}).items()
        },
      )
    except (
      ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ) as error:  # fmt: skip
      raise ValueError(f"not the text of a calibration: {error}") from error


def _row(row: Sequence, *positive: int) -> tuple:
  """Checks that entries are numbers, the first and `positive` ones above 0."""
  numbers = all(type(x) in (int, float) and abs(x) < 1e18 for x in row)
  if not numbers or any(row[i] <= 0 for i in (0, *positive)):
    raise ValueError(f"not the text of a calibration: {row}")
  return tuple(row)


def _fit(document: dict) -> Fit:
  fields = dict(document["efficiency"])
  rows = tuple(_row((count, x), 1) for count, x in fields.pop("rows"))
  p = fields.pop("p")
  efficiency = Efficiency(**fields, rows=rows, p=math.inf if p is None else p)
  names = ("in_sample", "formula", "held_out")
  residuals = (Errors(*document[name]) for name in names)
  times = tuple(PassTime(*_row(time, 1, 3)) for time in document["times"])
  return Fit(efficiency, *residuals, times)


def _overhead(document: dict) -> RoundFit:
  # Version 0.1.0 wrote the baseline as plain.
  baseline = document.get("plain") or document["baseline"]
  overheads = (
    Overhead(tuple(_row((b, x, y)) for b, x, y in entry["rows"]))
    for entry in (document["ours"], baseline)
  )
  times = tuple(RoundTime(*_row(time, 3)) for time in document["times"])
  return RoundFit(*overheads, Errors(*document["errors"]), times)
