"""A queue and its server: who is answered when, what is counted and refused.

That texts are those of one batch: slots_test.
"""

import dataclasses
import itertools
import json
import math
import re
import types

import jax
import numpy as np
import pytest

import programs
from specdec import acceptance as rules
from specdec import decode, drafters
from specdec.benchmark import calibrated, goodput, queues
from specdec.benchmark.metrics import acceptance
from specdec.benchmark.queues import Request, Server, requests_of
from specdec.benchmark.runs import BASELINE
from specdec.benchmark.setup import Setup
from specdec.cli import auto_flags, setup_flags
from specdec.report import result_tables, summary
from specdec.types import ModelOutput
from table_loop import MODEL, NEW, SIZE, table_decoder


class Clock:
  """A clock that goes on by 1 whenever it is read, and by what is slept."""

  def __init__(self):
    self.now, self.slept = 0.0, []

  def __call__(self) -> float:
    self.now += 1.0
    return self.now

  def sleep(self, seconds: float) -> None:
    self.slept.append(seconds)
    self.now += seconds


def serve(requests, rows=3, **options):
  """What a table's server answers, and its clock."""
  clock = Clock()
  decoder = table_decoder(rows=rows)
  server = Server(decoder, clock=clock, sleep=clock.sleep, **options)
  return server.serve(requests), clock


def at(arrivals, new=NEW):
  return [Request(i, [i % 4, 1], a, new) for i, a in enumerate(arrivals)]


@pytest.mark.parametrize(
  "arrivals",
  [
    [0.0] * 8,
    [0.0],  # fewer than rows
    [0.0, 0.0, 500.0, 500.5, 1000.0],  # all rows are empty in between
    [9.0, 1.0, 5.0, 0.0, 3.0, 2.0, 30.0],  # not in the order of their numbers
  ],
)
def test_every_request_is_answered_once_and_after_it_arrived(arrivals):
  served, clock = serve(at(arrivals))
  assert [one.request.number for one in served.answers] == [
    *range(len(arrivals))
  ]
  for one, arrival in zip(served.answers, arrivals):
    assert one.request.arrival == arrival <= one.admitted
    assert one.admitted < one.first <= one.finished <= served.seconds
    assert one.first_latency <= one.latency
    assert len(one.tokens) == NEW
  assert served.num_tokens == NEW * len(arrivals)
  assert served.goodput == served.num_tokens / served.seconds
  waited = [x for x in clock.slept if x > 100]
  assert len(waited) == sum(a in (500.0, 1000.0) for a in arrivals)


def test_who_arrives_first_is_admitted_first():
  arrivals = [9.0, 1.0, 5.0, 0.0, 3.0, 2.0, 30.0]
  served, _ = serve(at(arrivals), rows=1)
  admitted = [one.admitted for one in served.answers]
  assert np.argsort(admitted).tolist() == np.argsort(arrivals).tolist()


def test_a_full_batch_is_not_looked_at_until_a_row_is_done(monkeypatch):
  """One round after a refill, for the first token; then as many as it takes."""
  given = []
  honest = decode.run

  def run(*args):
    given.append((int(args[-2]), int(args[-1])))
    return honest(*args)

  monkeypatch.setattr(queues.decode, "run", run)
  serve(at([0.0, 0.0, 400.0]), rows=2, every=3)
  most = decode.MAX_ROUNDS
  # Full; then a row is empty, and a prompt is still to come; then the last.
  assert given[:2] == [(1, 1), (most, 1)]
  middle = [x for x in given if x[0] == 3]
  assert {x[1] for x in middle} <= {2}
  assert given[-2:] == [(1, 2), (most, 2)]


def test_counts_add_up_and_empty_rows_cost_no_counts():
  served, _ = serve(at([0.0] * 5), rows=2)
  one = acceptance([x.stats for x in served.answers])
  assert one.texts == 5 and one.emitted == served.num_tokens == 5 * NEW
  assert served.occupancy == one.target_passes / (2 * served.rounds)
  assert served.rounds < one.target_passes <= 2 * served.rounds
  alone, _ = serve(at([0.0]), rows=2)
  assert alone.occupancy == 0.5
  full, _ = serve(at([0.0]), rows=1)
  assert full.occupancy == 1.0


def test_planted_who_is_done_again_is_answered_twice(monkeypatch):
  """A row that is not emptied when its prompt leaves."""
  honest = Server._leave

  def leave(self, state, held, *rest):
    before = list(held)
    answers = honest(self, state, held, *rest)
    if len(answers) == 1 and not any(held):
      held[:] = before
      monkeypatch.undo()
    return answers

  monkeypatch.setattr(Server, "_leave", leave)
  served, _ = serve(at([0.0] * 4), rows=1)
  numbers = [one.request.number for one in served.answers]
  assert numbers != [*range(4)]


def test_a_text_whose_distribution_is_not_finite_ends_the_run():
  def apply(*args, **options):
    output, cache = MODEL.apply(*args, **options)
    if output.logits is None:
      return output, cache
    ends = cache.length[:, None, None] > 4
    logits = jax.numpy.where(ends, math.nan, output.logits)
    return ModelOutput(logits, output.hidden), cache

  decoder = table_decoder(rules.coupled(), drafters.lookup(2))
  decoder.target = MODEL._replace(apply=apply)
  with pytest.raises(ValueError, match=r"prompt 7 ends at token .* not finite"):
    Server(decoder).serve([Request(7, [1, 2], 0.0, NEW)])


@pytest.mark.parametrize(
  "requests, sentence",
  [
    ([], "there are no prompts to serve"),
    ([Request(0, [], 0.0, 1)], "prompt 0 has 0 tokens; a row has room for 1"),
    ([Request(3, [1] * (SIZE + 1), 0.0, 1)], "prompt 3 has 6 tokens; a row"),
    ([Request(0, [1], 0.0, NEW + 1)], "prompt 0 asks for 10 new tokens; a row"),
    ([Request(0, [1], 0.0, 0)], "prompt 0 asks for 0 new tokens"),
    ([Request(0, [1], -1.0, 1)], "prompt 0 arrives after -1.0 seconds"),
    ([Request(0, [1], math.nan, 1)], "prompt 0 arrives after nan seconds"),
    ([Request(1, [1], 0.0, 1)] * 2, "2 requests have the number 1"),
    ([Request(0, [4], 0.0, 1)], r"token id = 4; it must be in 0\.\.3"),
    ([Request(-1, [1], 0.0, 1)], "index = -1"),
  ],
)
def test_requests_that_cannot_be_served_are_refused(requests, sentence):
  with pytest.raises(ValueError, match=sentence):
    serve(requests)


def test_servers_that_cannot_serve_are_refused():
  decoder = table_decoder()
  for options, sentence in (
    ({"together": 0}, r"0 prompts prefilled together; it must be in 1\.\.3"),
    ({"together": 4}, "4 prompts prefilled together"),
    ({"every": 0}, "every = 0"),
  ):
    with pytest.raises(ValueError, match=sentence):
      Server(decoder, **options)
  decoder.places = object()
  with pytest.raises(ValueError, match="on one device alone"):
    Server(decoder)


def test_arrivals_are_poisson_and_another_rate_is_another_pace():
  prompts = [[1], [2], [3]]
  slow, fast = (
    requests_of(prompts, 4000, 9, 5, rate, seed=1) for rate in (2.0, 8.0)
  )
  a, b = (np.array([one.arrival for one in x]) for x in (slow, fast))
  assert np.allclose(a, 4 * b) and np.all(np.diff(a) > 0)
  gaps = np.diff(a)
  assert np.mean(gaps) == pytest.approx(0.5, rel=0.05)
  assert np.mean(gaps > 0.5) == pytest.approx(math.exp(-1), rel=0.06)
  assert [one.ids for one in slow[:4]] == [[1], [2], [3], [1]]
  new = [one.new_tokens for one in slow]
  assert {*new} == {5, 6, 7, 8, 9}
  assert new == [one.new_tokens for one in fast]
  assert new != [one.new_tokens for one in requests_of(prompts, 4000, 9, 5)]
  at_once = requests_of(prompts, 5, 9)
  assert {one.arrival for one in at_once} == {0.0}
  assert {one.new_tokens for one in at_once} == {9}


@pytest.mark.parametrize(
  "args, sentence",
  [
    (([], 3, 4), "no prompts"),
    (([[1]], 0, 4), "0 requests"),
    (([[1]], 3, 4, 5), "5 to 4 new tokens"),
    (([[1]], 3, 4, 0), "0 to 4 new tokens"),
    (([[1]], 3, 4, 1, 0.0), "0.0 requests a second"),
    (([[1]], 3, 4, 1, math.inf), "inf requests a second"),
  ],
)
def test_queues_that_are_none_are_refused(args, sentence):
  with pytest.raises(ValueError, match=sentence):
    requests_of(*args)


def test_ways_serve_the_same_queues_in_turns(monkeypatch):
  decoder = table_decoder(rules.coupled())
  served = []
  honest = Server.serve

  def spy(self, requests):
    name = "plain" if self.decoder.drafter is decode.NO_DRAFTER else "ours"
    served.append((name, tuple(one.arrival for one in requests)))
    return honest(self, requests)

  monkeypatch.setattr(Server, "serve", spy)
  servers = {"ours": Server(decoder), BASELINE: Server(decoder.baseline())}
  prompts = [[1, 2], [3]]
  given = servers, prompts, [2.0, math.inf], 6, 2
  [busy, full] = goodput.compare(*given, comparable=True)
  # Each twice to warm up, the second time all that is asked, then 2 x 2 at each
  # load.
  assert len(served) == 12
  assert [len(arrivals) for _, arrivals in served[:4]] == [3, 6, 3, 6]
  timed = served[4:]
  assert [name for name, _ in timed] == 2 * ["ours", "plain", "plain", "ours"]
  assert len({arrivals for _, arrivals in timed[:4]}) == 1
  assert {arrivals for _, arrivals in timed[4:]} == {(0.0,) * 6}
  assert timed[0][1][0] > 0
  for entries, load in ((busy, 2.0), (full, None)):
    plain, ours = entries
    assert plain["name"] == BASELINE and ours["name"] == "ours"
    assert plain["load"] == ours["load"] == load
    assert plain["speedup"] == {"value": 1.0, "error": 0.0, "samples": 2}
    assert plain["same_texts"] is None and ours["same_texts"] == 6
    assert ours["tokens"] == plain["tokens"] == 6 * NEW
    assert ours["rounds"] < plain["rounds"]
    rates = [ours["tokens"] / x for x in ours["seconds"]]
    assert ours["goodput"]["value"] == pytest.approx(np.mean(rates))
    assert ours["acceptance"]["emitted"] == 6 * NEW
    assert ours["latency"]["p50"] <= ours["latency"]["p99"]
    assert ours["warnings"] == []
  assert busy[0]["requests_per_second"] == 2 * busy[0]["capacity"]


def test_loads_that_are_none_are_refused_before_anything_runs():
  for loads in ([], [0.0], [1.0, -1.0], [math.nan]):
    with pytest.raises(ValueError, match="load"):
      next(goodput.compare({}, [[1]], loads, 6, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model of one layer, and prompts."""
  folder = programs.write_model(tmp_path_factory.mktemp("model"), num_layers=1)
  lines = [{"prompt": "abcabc"}, {"prompt": "hello there"}, {"prompt": "b"}]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "prompts.jsonl").write_text(text)
  return folder


def run(folder, *flags):
  given = [f"--target={folder}", f"--prompt_file={folder}/prompts.jsonl"]
  given += ["--drafter=lookup(min_ngram=0)", "--max_new_tokens=8"]
  programs.run("goodput", *given, "--requests=5", "--repeats=2", *flags)


def test_the_program_prints_and_writes_every_load(folder, tmp_path, capsys):
  path = tmp_path / "goodput.json"
  loads = "--batch=1,2", "--k=2", "--loads=0.5,inf", "--least_new_tokens=2"
  run(folder, *loads, f"--json={path}")
  document = json.loads(path.read_text())
  entries = document["goodput"]
  points = [(x["batch"], x["load"], x["name"]) for x in entries]
  assert points == [
    (batch, load, name)
    for batch in (1, 2)
    for load in (0.5, None)
    for name in (BASELINE, "k = 2")
  ]
  assert document["settings"]["loads"] == ["0.5", "inf"]
  assert [x["same_texts"] for x in entries] == [None, 5] * 4
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].split()[:2] == ["batch,", "load"]
  assert len(printed) == 9
  assert printed[4].split()[:4] == ["1,", "all", "at", "once"]


def entry(name, batch, load, speedup):
  estimate = {"value": speedup, "error": 0.01}
  latency = {"mean": 0.5, "p50": 0.5, "p90": 0.25, "p99": 1.0}
  tokens = {"tokens_per_pass": {"value": 2.5, "error": None}}
  return {
    "name": name,
    "batch": batch,
    "load": load,
    "goodput": {"value": 200 * speedup, "error": None},
    "speedup": estimate,
    "latency_speedup": {"value": 1.0 if load else 2.0, "error": 0.01},
    "latency": latency,
    "first_token": latency,
    "occupancy": 0.875,
    "acceptance": tokens,
    "same_texts": None if name == BASELINE else 7,
    "requests": 8,
  }


def test_a_page_says_where_a_way_loses():
  entries = [
    entry(name, batch, load, speedup)
    for batch, gain in ((1, 1.5), (16, 0.75))
    for load in (0.5, None)
    for name, speedup in ((BASELINE, 1.0), ("k = 2", gain), ("k = 4", 1.25))
  ]
  document = {"goodput_shipped": {"goodput": entries}}
  page = result_tables.TABLES["goodput"](document, "goodput_shipped")
  # Below a load of 1 all answer what arrives, and here as fast.
  assert page.endswith("answers (batch, load): k = 2 at 16, all at once")
  row = "| 16, all at once | k = 2 | 150.0 | 0.75 ± 0.01 | 2.00 ± 0.01 | 500 |"
  row += " 250 | 500 |"
  assert f"\n{row} 0.88 | 2.50 | - | 7/8 |" in page
  [answer] = [x for x in summary.ANSWERS if x.page == "goodput"]
  best = "batch 1: 1.50 ± 0.01 times, k = 2; batch 16: 1.25 ± 0.01 times, k = 4"
  assert answer.of(document) == f"all at once, the best of all ways: {best}"


@pytest.mark.parametrize(
  "speedup, where", [(1.43, "nowhere"), (1.42, "1, all at once")]
)
def test_a_page_says_where_adaptive_falls_short_of_the_best_number(
  speedup, where
):
  ways = (BASELINE, 1.0), ("k = 2", 1.5), ("k = 4", 1.25), ("adaptive", speedup)
  entries = [entry(name, 1, None, value) for name, value in ways]
  entries += [entry("adaptive", 4, None, 1.0), entry("k = 2", 4, None, 1.0)]
  document = {"goodput_shipped": {"goodput": entries}}
  page = result_tables.TABLES["goodput"](document, "goodput_shipped")
  assert page.endswith(f"adaptive under 0.95 times the best number's: {where}")


def test_the_python_of_the_page_on_measuring_runs(capsys):
  page = (programs.SCRIPTS.parent / "docs" / "measuring.md").read_text()
  [block] = re.findall(r"```python\n(.*?)```", page, re.S)
  exec(block, {})
  assert "tokens/s [" in capsys.readouterr().out


def lengths_of(**given):
  """Options of --length alone, the others their defaults."""
  options = {"length": ["auto", "adaptive"], "most_k": 5, "max_new_tokens": 8}
  options |= {"drafter": "lookup", "k": None, "batch": (1,)}
  return types.SimpleNamespace(**options | given, calibration=None, given=())


def test_the_levels_of_a_head_bound_what_is_tried(monkeypatch):
  """Before, `adaptive` of a head with fewer ended after the target was read."""
  monkeypatch.setattr(Setup, "most_levels", 2)
  options = lengths_of()
  auto_flags.check_lengths(options)
  assert options.most_k == 2


def test_memory_is_planned_for_the_longest_draft_that_is_tried():
  for k, levels in ((None, 5), ((1, 2), 5), ((7,), 7)):
    assert setup_flags.largest(lengths_of(k=k)).levels == levels


def test_lengths_are_decided_for_chains_whatever_shape_numbers_have(
  monkeypatch,
):
  def choose(setup, *_):
    calibrated.check(setup)
    return types.SimpleNamespace(k=3)

  def adaptive(setup, *_):
    calibrated.check(setup)
    return dataclasses.replace(setup, k=5, shape="adaptive")

  monkeypatch.setattr(auto_flags.auto, "choose", choose)
  monkeypatch.setattr(auto_flags.auto, "adaptive", adaptive)
  setup = Setup("nowhere", "lookup", shape="adaptive(costs=[1, 1.5])", k=1)
  ways = dict(auto_flags.lengths(lengths_of(), setup, None, [[1]]))
  shapes = {name: (one.k, one.shape) for name, one in ways.items()}
  assert shapes == {"auto, k = 3": (3, "chain"), "adaptive": (5, "adaptive")}


def test_an_interrupted_run_leaves_what_was_written_before(
  folder, tmp_path, monkeypatch
):
  path = tmp_path / "goodput.json"
  path.write_text("older\n")
  served = itertools.count()
  honest = Server.serve

  def serve(self, requests):
    if next(served) == 3:
      raise KeyboardInterrupt
    return honest(self, requests)

  monkeypatch.setattr(Server, "serve", serve)
  with pytest.raises(SystemExit, match="goodput: stopped"):
    run(folder, f"--json={path}")
  assert path.read_text() == "older\n"
  assert [x.name for x in tmp_path.iterdir()] == ["goodput.json"]
