"""Draft lengths of table models, priced: counted right, and worth it."""

import collections
import json

import jax
import numpy as np
import pytest

import programs
from specdec import draft_length, draft_shape, drafters
from specdec.benchmark import priced_lengths
from specdec.benchmark.priced_lengths import Draw, Load, Way
from specdec.benchmark.scenario import Scenario
from specdec.report import goodput_tables, result_tables
from specdec.roofline import chips, planning
from specdec.testing import table_model

SLOW = pytest.mark.slow
CONTEXT = 512
PAIR = Scenario.of(
  "llama3-8b", "model(llama3-1b)", chips.get("v6e"), ways=1
).pair
UNEQUAL = Load("unequal", priced_lengths.UNEQUAL)
EQUAL = Load("equal", (0.8, 0.8))


@pytest.mark.parametrize("wanted", [(0.95, 0.2), (0.8, 0.8)])
def test_tables_agree_as_often_as_is_said(wanted):
  size = 8
  params = table_model.agreeing_params(3, 2 * size, wanted)
  target, draft = (
    np.asarray(jax.nn.softmax(x["table"]), float)
    for x in (params.target, params.draft)
  )
  for number, agreement in enumerate(wanted):
    region = slice(number * size, (number + 1) * size)
    np.testing.assert_allclose(
      target[:, region, region].sum(axis=-1), 1.0, rtol=1e-5
    )
    np.testing.assert_allclose(
      draft[:, region, region].sum(axis=-1), 1.0, rtol=1e-5
    )
    within = (x[region, region, region] for x in (target, draft))
    assert abs(table_model.agreement(*within) - agreement) < 1e-4


def test_what_tables_cannot_do_is_refused():
  with pytest.raises(ValueError, match="7 tokens do not make 2 equal regions"):
    table_model.agreeing_params(0, 7, (0.5, 0.5))
  with pytest.raises(ValueError, match=r"agree more often than 0\.01"):
    table_model.agreeing_params(0, 8, (0.01, 0.5))


def test_rows_accept_by_the_region_of_their_first_token():
  draw = Draw.of(UNEQUAL, 8, 0)
  _, (stats, _) = priced_lengths.decoded(Way(draft_shape.chain(1)), draw)
  for region, agreement in enumerate(priced_lengths.UNEQUAL):
    rows = np.asarray(draw.regions) == region
    accepted, evaluated = (
      np.sum(getattr(stats, name)[rows]) for name in ("accepted", "evaluated")
    )
    assert evaluated > 200
    # Of the text's tokens; rounds begin oftener where the draft is wrong.
    assert abs(accepted / evaluated - agreement) < 0.06


def one_row(tokens: int) -> Draw:
  """One row, whose draft is the target itself."""
  draw = Draw.of(EQUAL, 1, 0)
  same = draw.params._replace(draft=draw.params.target)
  return draw._replace(params=same, tokens=[tokens])


def test_a_total_is_what_one_counts_by_hand():
  """12 tokens: 3 a round; one, as none pays; one, after a look at the draft."""
  plain = PAIR.round(1, 0, CONTEXT).seconds
  look = PAIR.round(1, 1, CONTEXT).only("draft").seconds
  for way, total in (
    (Way(draft_shape.chain(2)), 4 * PAIR.round(1, 2, CONTEXT).seconds),
    (Way(draft_length.adaptive(2, [1.0, 9.0, 99.0])), 12 * plain),
    (Way(draft_length.entropy(2, 1.0), True), 12 * (plain + look)),
  ):
    rounds, _ = priced_lengths.decoded(way, one_row(12))
    seconds = priced_lengths.seconds(PAIR, 1, CONTEXT, rounds)
    assert rounds.emitted.sum() == 12
    np.testing.assert_allclose(seconds.sum(), total, rtol=1e-6)


def test_what_a_draft_model_reads_to_catch_up_is_priced():
  rounds = priced_lengths.Rounds(
    *np.array([[2, 0], [3, 1], [16, 0], [2, 1]]), 1
  )
  seconds = priced_lengths.seconds(PAIR, 4, CONTEXT, rounds)
  reading = 16 * PAIR.catch_up(4, CONTEXT)
  by_hand = PAIR.round(4, 2, CONTEXT).seconds + reading
  baseline = PAIR.round(4, 0, CONTEXT).seconds
  np.testing.assert_allclose(seconds, [by_hand, baseline])


@pytest.fixture
def passes(monkeypatch):
  """Passes of the draft model by their tokens a row, counted as they run."""
  counts, honest = collections.Counter(), drafters.model

  def counting(model, shape):
    def apply(params, tokens, cache, **options):
      size = tokens.shape[1]
      jax.debug.callback(lambda: counts.update([size]))
      return model.apply(params, tokens, cache, **options)

    return honest(model._replace(apply=apply), shape=shape)

  monkeypatch.setattr(drafters, "model", counting)
  priced_lengths._decoded.clear_cache()
  yield counts
  priced_lengths._decoded.clear_cache()


@pytest.mark.parametrize(
  "way",
  [
    pytest.param(Way(draft_shape.chain(3)), marks=SLOW),
    Way(draft_length.adaptive(3, [1.0, 1.6, 2.2, 2.8])),
    Way(draft_length.entropy(3), True),
  ],
  ids=["fixed", "adaptive", "entropy"],
)
def test_steps_are_those_that_the_draft_model_ran(way, passes):
  """The first of a round takes two tokens, a pass that catches up eight."""
  draw = Draw.of(UNEQUAL, 3, 1)  # of which two accept little
  rounds, _ = priced_lengths.decoded(way, draw)
  jax.effects_barrier()
  assert rounds.steps.sum() == passes[1] + passes[2]
  assert np.count_nonzero(rounds.steps) == passes[2]
  assert rounds.caught_up.sum() == 8 * passes[8]
  assert {*passes} <= {1, 2, 8}
  if way.shape.spec.classes:
    assert passes[8] > 2  # it did catch up


def test_wrong_costs_choose_other_lengths_and_lose():
  batch, most = 4, 4
  right = priced_lengths.ways(PAIR, batch, CONTEXT, most)["adaptive"]
  costs = planning.step_costs(
    PAIR, batch, CONTEXT, draft_shape.step_widths(most)
  )
  dear = [costs[0] + 10 * (cost - costs[0]) for cost in costs]
  wrong = Way(draft_length.adaptive(most, dear))
  draw, totals = Draw.of(EQUAL, batch, 0), []
  for way in (right, wrong):
    rounds, _ = priced_lengths.decoded(way, draw)
    seconds = priced_lengths.seconds(PAIR, batch, CONTEXT, rounds)
    totals.append((rounds.steps.mean(), seconds.sum()))
  assert totals[0][0] > 2 > 0.2 > totals[1][0]
  assert totals[0][1] < 0.8 * totals[1][1]


def least_gains(load: Load, batch: int) -> tuple[float, float]:
  """What `adaptive` must gain: times plain, and times the best number.

  The goals, or how far below them it may stay where it does: it weighs the
  tokens of the whole batch, so that rows that accept nothing wait for the
  others, and all for them in the end; with few rows, luck counts.
  """
  if not load.steady:
    return 0.75, 0.8
  if batch == 4:
    return goodput_tables.LEAST, 0.92
  return goodput_tables.LEAST, goodput_tables.NEAR


@pytest.mark.slow
@pytest.mark.parametrize(
  "batch", [16, pytest.param(4, marks=SLOW), pytest.param(64, marks=SLOW)]
)
def test_where_costs_are_exact_adaptive_gains_what_it_should(batch):
  named = priced_lengths.ways(PAIR, batch, CONTEXT, 8)
  del named["entropy"]
  for load in priced_lengths.loads(0.8)[:3]:
    draws = [Draw.of(load, batch, seed) for seed in range(max(2, 32 // batch))]
    speedups = {}
    for name, way in named.items():
      rounds = [priced_lengths.decoded(way, draw)[0] for draw in draws]
      entry = priced_lengths.summed(PAIR, CONTEXT, load, draws, rounds)
      speedups[name] = entry["speed"]["speedup"]["value"]
    ours = speedups.pop("adaptive")
    of_plain, of_best = least_gains(load, batch)
    assert ours >= of_plain, load.name
    assert ours >= of_best * max(speedups.values()), load.name


def entry(load: str, batch: int, way: str, speedup: float) -> dict:
  estimate = {"value": speedup, "error": 0.01}
  return {
    "load": load, "batch": batch, "way": way, "k": [1], "steps": 1.0,
    "speed": {"speedup": estimate},
  }  # fmt: skip


def test_the_program_prints_and_keeps_them(monkeypatch, tmp_path, capsys):
  given = []

  def compare(*args):
    given.extend(args[1:])
    for load, speedup in (("even", 1.2), ("uneven", 0.9)):
      yield entry(load, 4, "k = 1", 1.1)
      yield entry(load, 4, "adaptive", speedup)

  monkeypatch.setattr(priced_lengths, "compare", compare)
  flags = "--chip=v6e", "--ways=1", "--target=llama3-8b", "--alpha=0.8"
  path = tmp_path / "one.json"
  more = "--batches=4", "--context=512", "--most=4", "--lengths=3"
  programs.run("roofline", *flags, *more, f"--json={path}")
  assert given == [(4,), 512, 0.8, 4, 3]
  assert "1.20 ± 0.01" in capsys.readouterr().out
  document = json.loads(path.read_text())
  text = result_tables.TABLES["priced_lengths"]({"x": document}, "x")
  even, uneven = text.split("Acceptance uneven:")
  assert even.startswith("Acceptance even:\n\n| rows | k = 1 | adaptive |")
  assert "| 4 | 1.10 ± 0.01 | **1.20 ± 0.01** |" in even
  assert "decoding alone, rows: none\n" in even
  assert "| 4 | **1.10 ± 0.01** | 0.90 ± 0.01 |" in uneven
  assert "decoding alone, rows: 4\n" in uneven
