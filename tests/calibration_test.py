"""Fits recover the parameters that generated the times, or report errors."""

import dataclasses
import functools
import json
import math
import operator
import re

import numpy as np
import pytest

from specdec.benchmark import calibrate
from specdec.models import presets
from specdec.report import roofline
from specdec.roofline import (
  calibration,
  chips,
  hardware,
  prediction,
  shapes,
)
from specdec.roofline.calibration import PassTime, RoundTime
from specdec.roofline.cost import Cost, Deployment, Efficiency, Term
from specdec.roofline.round_cost import (
  NOTHING,
  Overhead,
  Round,
  TargetDraftPair,
)
from specdec.types import DrafterCost, Stats

MACHINE = hardware.Hardware(
  name="a machine",
  memory=1 << 34,
  bandwidth=((4 << 20, 9e10), (1 << 30, 4e10)),
  copy_bandwidth=1.5e10,
  flops={"float32": 1.5e11},
  date="2026-01-01",
  jax_version="0",
)
CHIP = chips.of_hardware(MACHINE)
TRUE = Efficiency(
  one=0.8, weights=0.4, kv=0.1, flops=0.3, p=1.2, layer_overhead=1e-4
)


def deployment(name="smollm2-135m", efficiency=TRUE, **layers):
  shape = shapes.of_config(presets.get(name), name)
  types = {"weights": "float32", "kv": "float32"}
  return Deployment(shape, CHIP, efficiency=efficiency, **types, **layers)


def early_exit(ours=NOTHING, baseline=NOTHING):
  cost = DrafterCost(exit_layer=2)
  return TargetDraftPair(
    deployment(), cost, overhead=ours, baseline_overhead=baseline
  )


def timed(model, points):
  return [PassTime(*p, model.cost(*p).seconds) for p in points]


def fitted(model, batch=16, tokens=9):
  passes = calibrate.plan(batch, tokens, 256)
  return calibration.fit_passes(model, *(timed(model, some) for some in passes))


def test_a_fit_recovers_what_generated_the_times():
  points, unseen = calibrate.plan(16, 9, 256)
  assert {p[0] * p[1] for p in points} & {1} and len(unseen) >= 5
  assert not set(points) & set(unseen)
  fit = fitted(deployment())
  assert CHIP.read_bandwidth(1 << 20) == 9e10
  assert CHIP.read_bandwidth(1 << 28) == CHIP.bandwidth == 4e10
  assert fit.in_sample.rms < 0.01
  assert fit.formula.rms < 0.02
  assert fit.held_out.rms < 0.02 and fit.held_out.points == len(unseen)
  assert fit.efficiency.one == pytest.approx(TRUE.one, rel=0.3)


def test_what_the_formula_lacks_goes_into_the_factors():
  """Kernels that take half as long again for 8 tokens and more."""
  step = dataclasses.replace(TRUE, rows=((1, 1), (6, 1), (8, 1.5), (144, 1.5)))
  fit = fitted(deployment(efficiency=step))
  assert fit.formula.rms > 0.03 > fit.held_out.rms
  assert fit.in_sample.rms < 0.03  # what stands out alone is not believed
  points, _ = calibrate.plan(16, 9, 256)
  sizes = sorted({batch * tokens for batch, tokens, _ in points})
  assert [m for m, _ in fit.efficiency.rows] == sizes


def test_drift_is_the_median_over_points_timed_twice():
  model = deployment()
  then = [PassTime(1, n, 16, 1.0 + n) for n in range(1, 6)]
  now = [p._replace(seconds=1.2 * p.seconds) for p in then]
  now[3] = now[3]._replace(seconds=9.0)  # out of luck
  assert calibration.drift(model, then, now) == pytest.approx(1.2)
  # Of what was not timed then, the model says how long it took.
  [new] = timed(model, [(2, 3, 16)])
  slow = new._replace(seconds=1.5 * new.seconds)
  assert calibration.drift(model, then, [slow]) == pytest.approx(1.5)


def test_turns_that_were_slow_are_slow_for_all():
  rng = np.random.default_rng(0)
  true = [1.0, 2.0, 5.0, 3.0]
  slow = np.exp(rng.normal(0, 0.3, 9))
  runs = []

  def run(number: int) -> float:
    runs.append(number)
    return true[number] * slow[(len(runs) - 1) // 5]

  timers = [
    calibrate.Timer(PassTime(1, n, 1, 0.0), functools.partial(run, n))
    for n in range(4)
  ]
  first, second = calibrate.in_turns([timers[:3], timers[3:]], 9)
  assert [time.tokens for time in first + second] == [0, 1, 2, 3]
  seconds = np.array([time.seconds for time in first + second])
  np.testing.assert_allclose(seconds / seconds[0], np.array(true) / true[0])
  # The group of one timer is timed twice a turn.
  assert runs == [0, 3, 1, 3, 2] * 9


@pytest.mark.parametrize("noise, turns", [(0.0, 4), (0.5, 8)])
def test_turns_are_added_where_times_scatter(noise, turns):
  rng = np.random.default_rng(1)
  timers = [
    calibrate.Timer(
      PassTime(1, n, 1, 0.0), lambda: float(np.exp(rng.normal(0, noise)))
    )
    for n in range(3)
  ]
  reports = []
  calibrate.in_turns([timers], 4, reports.append)
  assert len(reports) == turns + 1
  assert "1 standard error" in reports[-1]


def test_a_calibration_needs_points_that_took_time():
  points, _ = calibrate.plan(4, 4, 256)
  times = timed(deployment(), points)
  with pytest.raises(ValueError, match="needs 6"):
    calibration.fit_passes(deployment(), times[:5])
  for seconds in (0.0, -1.0, math.nan, math.inf):
    wrong = PassTime(1, 1, 1, seconds), RoundTime(1, 0, 256, seconds)
    with pytest.raises(ValueError, match=f"1 x 1 took {seconds:g} s; it must"):
      calibration.fit_passes(deployment(), [*times, wrong[0]])
    with pytest.raises(ValueError, match="batch 1, k = 0 took"):
      calibration.fit_overhead(TargetDraftPair(deployment()), wrong[1:])


def test_overhead_of_rounds_is_recovered():
  true = (
    Overhead(((1, 2e-4, 1e-4), (4, -3e-4, 2e-4), (16, 8e-4, 0.0))),
    Overhead(((1, 1e-4, 0.0), (4, -2e-4, 0.0), (16, 0.0, 0.0))),
  )
  pair = early_exit(*true)
  rounds = [
    RoundTime(b, k, 256, pair.round(b, k, 256).seconds)
    for b in (16, 1, 4)
    for k in (0, 2, 5, 10)
  ]
  fit = calibration.fit_overhead(pair, rounds)
  assert fit.errors.rms < 1e-6 and fit.errors.points == len(rounds)
  for fitted, wanted in ((fit.ours, true[0]), (fit.baseline, true[1])):
    np.testing.assert_allclose(fitted.rows, wanted.rows, atol=1e-9)
  # Between batches: halfway in their logarithm; outside, the outer one.
  assert fit.ours.seconds(2, 3) == pytest.approx((5e-4 + 3e-4) / 2)
  assert fit.ours.seconds(64, 3) == pytest.approx(8e-4)
  # One depth says nothing of a draft pass.
  [row] = calibration.fit_overhead(pair, rounds[1:2]).ours.rows
  assert row == (16, pytest.approx(8e-4), 0.0)
  assert calibration.fit_overhead(pair, rounds[1:3]).errors.points == 0


def test_no_round_is_predicted_faster_than_its_bytes_allow():
  """Rounds of k = 5 timed shorter than of 2: a line that goes below 0."""
  pair = early_exit()
  passes = {k: pair.round(1, k, 256).seconds for k in (0, 2, 5)}
  times = (0, passes[0]), (2, 2 * passes[5]), (5, passes[5])
  rounds = [RoundTime(1, k, 256, seconds) for k, seconds in times]
  fit = calibration.fit_overhead(pair, rounds)
  final = dataclasses.replace(
    pair, overhead=fit.ours, baseline_overhead=fit.baseline
  )
  seconds = [final.round(1, k, 256).seconds for k in range(1, 17)]
  assert seconds[4] >= seconds[1] - 1e-9  # k = 5 takes no less than k = 2
  assert min(seconds[4:]) == seconds[4]
  observed = prediction.Observed((0.5,) * 16, 1.0, 10.0)
  result = prediction.predict(final, observed, 1, 1, 256, 30)
  assert 0 < result.speedup < 17


def test_c_and_the_rounds_of_texts_that_end_early():
  pair = early_exit()
  observed = prediction.Observed((0.5, 0.25), 1.0, 10.0)
  full = prediction.predict(pair, observed, 4, 2, 256, 30)
  assert full.baseline_seconds == pytest.approx(
    60 * full.baseline_round_seconds
  )
  two = pair.round(2, 2, 256)
  passes = pair.round(2, 0, 256).seconds, pair.round(2, 2, 256).seconds
  verify = two.only("target").seconds
  assert full.cost == pytest.approx((passes[1] - verify) / 2 / passes[0])
  ended = dataclasses.replace(observed, baseline_rounds=30.0)
  half = prediction.predict(pair, ended, 4, 2, 256, 30)
  assert half.speedup == pytest.approx(full.speedup / 2)
  none = prediction.predict(pair, prediction.Observed((), 1, 9), 4, 2, 256, 30)
  assert none.cost == 0


def test_a_negative_overhead_leaves_the_time_of_the_bytes():
  below = Overhead(((1, -1.0, -1.0),))
  pair = early_exit(below, below)
  for whole in (pair.round(1, 0, 16), pair.round(1, 8, 16)):
    moved = sum(times * cost.bytes for _, times, cost in whole.parts)
    least = moved / CHIP.bandwidth
    assert whole.seconds == pytest.approx(least)
  assert 0 < pair.speedup(1, 16, [0.5]) < 2


@pytest.mark.parametrize(
  "acceptance, wide, rounds, sentence",
  [
    ((0.5, 0.6), 0.5, 3.0, "ascends"),
    ((math.nan,), 0.5, 3.0, r"outside \[0, 1\]"),
    ((0.5,), -0.1, 3.0, r"wide = -0.1; it must be in \[0, 1\]"),
    ((0.5,), math.nan, 3.0, "wide = nan"),
    ((0.5,), 0.5, 0.0, "rounds = 0.0; it must be finite and > 0"),
    ((0.5,), 0.5, math.inf, "rounds = inf"),
  ],
)
def test_observations_that_cannot_be_are_refused(
  acceptance, wide, rounds, sentence
):
  with pytest.raises(ValueError, match=sentence):
    prediction.Observed(acceptance, wide, rounds)


def test_a_calibration_is_read_as_it_was_written():
  model = deployment()
  fit = fitted(model, 2, 4)
  efficiency = dataclasses.replace(fit.efficiency, p=math.inf)
  endless = dataclasses.replace(fit, efficiency=efficiency)
  overhead = calibration.fit_overhead(
    TargetDraftPair(model), [RoundTime(1, 0, 256, 1.0)]
  )
  saved = calibration.Calibration(
    MACHINE, {"a": fit, "b": endless}, {"a, lookup": overhead}, {"a": 1e10}
  )
  assert calibration.Calibration.from_json(saved.to_json()) == saved
  assert saved.place("a", model).efficiency == fit.efficiency
  with pytest.raises(ValueError, match="has no 'c'; it has: a, b"):
    saved.place("c", model)
  old = json.loads(saved.to_json()) | {"format": "specdec/calibration/2"}
  del old["bandwidth"]
  saved = dataclasses.replace(saved, bandwidth={})
  old["beside"] = old.pop("overhead")
  for entry in old["beside"].values():
    entry["plain"] = entry.pop("baseline")
  old = json.dumps(old)
  assert calibration.Calibration.from_json(old) == saved  # of version 0.1.0
  for broken in ("{}", "[]", '{"format": "specdec/calibration/2"}', "no"):
    with pytest.raises(ValueError):
      calibration.Calibration.from_json(broken)
  seconds = "fits", "a", "times", 0, 3
  round_batch = "overhead", "a, lookup", "times", 0, 0
  fixed = "overhead", "a, lookup", "baseline", "rows", 0, 1
  for place, values in (
    (seconds, (0, -1, None, "1", [1], {}, True, math.nan, math.inf, 10**30)),
    (round_batch, (0, None, "x")),
    (fixed, (None, "x", [], math.nan)),
    (("bandwidth", "a"), (0, None, "1")),
  ):
    for value in values:
      document = json.loads(saved.to_json()) | {"bandwidth": {"a": 1.0}}
      *parents, last = place
      functools.reduce(operator.getitem, parents, document)[last] = value
      with pytest.raises(ValueError, match="not the text of a calibration"):
        calibration.Calibration.from_json(json.dumps(document))


def test_a_bandwidth_ratio_scales_what_main_memory_has_a_part_in():
  """A set that fits the caches is read as fast as ever."""
  sets = (4 << 20, 9e10), (64 << 20, 6e10), (1 << 30, 4e10)
  machine = dataclasses.replace(MACHINE, bandwidth=sets)
  model = deployment()
  saved = calibration.Calibration(machine, {"a": fitted(model, 2, 4)})
  same, half = (saved.place("a", model, x).chip for x in (1.0, 0.5))
  assert (same.bandwidth, half.bandwidth) == (4e10, 2e10)
  assert half.caches == ((4 << 20, 9e10), (64 << 20, 3e10))


def stats(rounds, drafted, accepted, widths):
  fields = dict.fromkeys(Stats.__dataclass_fields__, np.zeros(len(rounds)))
  given = {"rounds": rounds, "drafted": drafted, "accepted": accepted}
  given |= {"evaluated": drafted, "widths": widths}
  return Stats(**fields | {name: np.array(x) for name, x in given.items()})


def test_what_was_observed_of_draft_tokens():
  # Half of the rounds drafted; of those with room for both, 0.6 and 0.4.
  one = stats([20], [[10, 5]], [[6, 2]], [5, 15])
  observation = prediction.observed([[one, one]])
  np.testing.assert_allclose(observation.prefix_acceptance, [0.3, 0.2])
  assert observation.wide == 0.75 and observation.rounds == 40
  again = stats([20], [[10, 5]], [[8, 2]], [5, 5])
  twice = prediction.observed([[one], [again]])
  np.testing.assert_allclose(twice.prefix_acceptance, [0.35, 0.2])
  # All texts together: sums over sums, not a mean of ratios.
  both = stats([10, 30], [[10], [30]], [[9], [3]], [40])
  both = prediction.observed([[both]])
  np.testing.assert_allclose(both.prefix_acceptance, [0.3])
  none = prediction.observed([[stats([9], [[]], [[]], [9])]])
  assert none.prefix_acceptance == ()


def test_a_prediction_is_rounds_times_seconds():
  ours, theirs = (Overhead(((1, x, 0.0),)) for x in (1e-3, 5e-4))
  pair = TargetDraftPair(deployment(), overhead=ours, baseline_overhead=theirs)
  sure = prediction.Observed((1.0, 1.0), 1.0, 10.0)
  result = prediction.predict(pair, sure, 2, 2, 256, 30)
  assert result.seconds == pytest.approx(10 * pair.round(2, 2, 256).seconds)
  baseline = 30 * pair.round(2, 0, 256).seconds
  assert result.baseline_seconds == pytest.approx(baseline)
  assert result.tokens == 3
  assert result.speedup == result.baseline_seconds / result.seconds
  assert result.steady_speedup == pytest.approx(result.speedup)
  # Two batches of one row each, and half of the rounds idle.
  half = dataclasses.replace(sure, wide=0.5, rounds=20.0)
  apart = prediction.predict(pair, half, 2, 1, 256, 30)
  mean = pair.round(1, 2, 256).seconds + pair.round(1, 0, 256).seconds
  assert apart.round_seconds == pytest.approx(mean / 2)
  assert apart.seconds == pytest.approx(20 * apart.round_seconds)
  baseline = prediction.Observed((), 1.0, 30.0)
  assert prediction.predict(pair, baseline, 2, 2, 256, 30).speedup == 1


def test_an_explanation_names_every_term():
  cost = early_exit(Overhead(((1, 1e-3, 0.0),))).round(2, 3, 256)
  text = roofline.explain(cost)
  for name in ("weights", "projection", "KV read", "logits", "overhead"):
    assert name in text
  whole = re.findall(r"^  (\S.*?)  +(\d) .* (\S+)$", text, re.MULTILINE)
  assert [times for _, times, _ in whole] == ["3", "1", "1", "1"]
  seconds = sum(int(times) * float(ms) for _, times, ms in whole) / 1e3
  assert seconds == pytest.approx(cost.seconds, rel=1e-3)


@pytest.mark.parametrize("seconds", [-0.0, 1.861e-15, -1e-12])
def test_what_rounds_to_nothing_is_explained_as_0(seconds):
  term = Term("overhead", seconds=seconds or 1e-300)
  parts = (("target", 1, Cost((term,), seconds)),)
  lines = roofline.explain(Round(parts, seconds)).splitlines()
  assert [line.split()[-1] for line in lines[1:]] == ["0", "0", "0"]


def test_rounds_are_priced_by_a_batch_of_which_so_long_a_draft_was_timed():
  pair = early_exit()
  times = [
    RoundTime(batch, k, 256, factor * pair.round(batch, k, 256).seconds)
    for batch, factor, ks in ((8, 2.0, (0, 1, 2)), (16, 3.0, (0, 1, 2, 4, 8)))
    for k in ks
  ]
  fit = dataclasses.replace(
    calibration.fit_overhead(pair, times), times=tuple(times)
  )
  np.testing.assert_allclose(fit.scale(pair, 10, 8), 3.0)
  np.testing.assert_allclose(fit.scale(pair, 10, 2), 2.0)
