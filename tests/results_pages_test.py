"""Pages of results: what they show is what results/ holds, and nothing else."""

import json
import pathlib
import re

import pytest

import programs
from documents import run
from specdec.benchmark import reproduction
from specdec.benchmark.measurements import FOUR_KINDS, MEASUREMENTS
from specdec.report import length_tables, regions, summary
from specdec.report.regions import REGION, Documents

ROOT = programs.SCRIPTS.parent
RESULTS = Documents(ROOT / "results")
PAGES = regions.pages(ROOT)
SHOWN = {page: page.read_text() for page in PAGES}
NAMES = {one.name: one for one in MEASUREMENTS}


def name_of(page: pathlib.Path) -> str:
  return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_what_its_results_give(page):
  pictures = []
  filled = regions.fill(SHOWN[page], RESULTS, lambda x, _: pictures.append(x))
  assert filled == SHOWN[page], "python scripts/report.py --results=results"
  assert [x for x in pictures if not (page.parent / x).is_file()] == []


def prose_of(page):
  """What stands outside regions, code and links."""
  prose = re.sub(r"```.*?```", "", REGION.sub("", SHOWN[page]), flags=re.S)
  return re.sub(r"\]\([^)]*\)|`[^`]*`", "", prose)


@pytest.mark.parametrize(
  "page", [x for x in PAGES if x.parent.name == "results"], ids=name_of
)
def test_numbers_are_in_regions_alone(page):
  prose = prose_of(page).replace("0.90 to 1.10", "").replace("0.1.0", "")
  assert re.findall(r"\d+\.\d+|\d+ ?%|±.*\d", prose) == []


MEASURED = r"\d+ ?%|± *\d|\d (?:ms|GB/s|tokens/s)|\d times (?:as|faster)"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_types_a_measured_number(page):
  assert re.findall(rf".*(?:{MEASURED}).*", prose_of(page)) == []


def test_every_measurement_is_shown_and_none_that_there_is_not():
  orders = [x[1] for text in SHOWN.values() for x in REGION.findall(text)]
  shown = {name for order in orders for name in order.split() if name in NAMES}
  assert shown == {*NAMES}
  assert {*RESULTS} <= {*NAMES}
  for row in summary.ANSWERS:
    assert (ROOT / "docs" / "results" / f"{row.page}.md").is_file()


@pytest.mark.parametrize("name", [*RESULTS])
def test_results_are_whole_runs_of_these_commands(name):
  document = RESULTS[name]
  assert not document["measurement"]["quick"]
  plan = reproduction.Plan(pathlib.Path("results"), pathlib.Path(), FOUR_KINDS)
  assert document["command"] == plan.command(NAMES[name])


@pytest.mark.parametrize("name", [*RESULTS])
def test_results_name_no_folder_of_a_machine(name):
  text = (ROOT / "results" / f"{name}.json").read_text()
  assert re.findall(r'"/[^"]*/', text) == []


def test_results_are_small():
  sizes = [x.stat().st_size for x in (ROOT / "results").glob("*.json")]
  assert sum(sizes) < 3e6


def document(**changes):
  return {
    "command": "python scripts/x.py",
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {
      "python": "3.13", "jax": "1", "flax": "2", "kernels": "C++",
      "commit": "abc",
    },
    "machine": {"device": "a machine", "cpu_cores": 2},
    "measurement": {
      "name": "one", "quick": False, "minutes": 1.5, "busy_cores": 0.1
    },
    "settings": {"target": "t", "context": 128, "temperature": 0.0},
    "peak_memory": 5e6,
    "passes": [
      {
        "batch": 1,
        "tokens": n,
        "seconds": {"median": s, "quartiles": [s, s]},
        "times_first": {"value": s / 0.010, "error": 0.02},
        "bandwidth": 4e10,
        "bandwidth_share": {"value": 0.87, "error": 0.02},
        "roof_seconds": 0.009,
      }
      for n, s in ((1, 0.010), (8, 0.013))
    ],
    "runs": [
      run(group, k, tokens=1.25, speedup=1.25)
      for group in ("code", "all")
      for k in (2, 3)
    ],
  } | changes  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "one.json").write_text(json.dumps(document()))
  return tmp_path


def fill(folder, *orders, draw=None):
  text = "".join(f"<!-- {order} -->9.99<!-- end -->\n" for order in orders)
  return regions.fill(text, Documents(folder), draw)


def test_a_table_comes_with_command_machine_and_versions_once(folder):
  text = fill(folder, "results: passes one", "results: passes one")
  row = "| C++ | as dtype | 128 | 1 | 10.00 | 13.00 (1.30 ± 0.02) | 40 | "
  row += "87 ± 2 % | 90% | 5 |"
  assert text.count(row) == 2
  head = (
    "- `python scripts/x.py`: 2026-01-02 03:04; commit abc; a machine, 2 "
    "cores; 0.1 of them busy before; Python 3.13, jax 1, flax 2; C++ kernels; "
    "1.5 min"
  )
  assert text.count(head) == 1
  assert "9.99" not in text
  assert regions.fill(text, Documents(folder)) == text
  # A number that somebody edits is noticed.
  assert regions.fill(text.replace("1.30", "1.03"), Documents(folder)) == text


def test_texts_of_a_kind_stand_by_k(folder):
  text = fill(folder, "results: groups one")
  cell = "1.25 ± 0.05, 1.25 ± 0.05"
  assert f"| code | 2 | 60.0 | {cell} | {cell} | 2 of 2 |" in text


def test_widths_at_which_beam_search_gains_or_loses_stand_below(tmp_path):
  entries = [
    {"width": width, "steps": 9, "rounds": 6, "steps_per_round": 1.5,
     "plain_seconds": 2.0, "seconds": 1.0, "same_beams": 4, "batches": 4,
     "error_over": "batches", "speedup": {"value": speedup, "error": 0.05}}
    for width, speedup in ((1, 1.5), (2, 1.2), (4, 1.04), (8, 0.8))
  ]  # fmt: skip
  one = document(beam_searches=entries)
  (tmp_path / "one.json").write_text(json.dumps(one))
  text = fill(tmp_path, "results: beams one")
  assert "- faster than plain beam search at width 1, 2\n" in text
  assert "- slower than plain beam search at width 8\n" in text
  assert "- standard errors are over batches" in text


def test_values_stand_in_sentences(folder):
  speedup = "value: one runs[k=3,group=all].speed.speedup"
  tokens = f"{speedup}.value .1f"
  text = fill(folder, speedup, tokens, "value: one settings.target")
  assert re.findall("-->(.*)<!-- end", text) == ["1.25 ± 0.05", "1.2", "t"]


@pytest.mark.parametrize(
  ("order", "sentence"),
  [
    ("results: passes two", "not measured yet: .*--only=two"),
    ("value: two runs", "not measured yet: .*--only=two"),
    ("results: answers", r"own\?.*1?\d of \d comparisons"),
    ("results: headlines", r"docs/results/pair.md\) \| not measured yet"),
  ],
)
def test_what_is_not_there_is_named(folder, order, sentence):
  assert re.search(sentence, fill(folder, order))


@pytest.mark.parametrize(
  ("order", "sentence"),
  [
    ("results: pass one", "did you mean passes"),
    ("value: one runs[k=9].speed", "there is no runs"),
    ("value: one passes[batch=1].seconds", "there is no passes"),
    ("results: decoding one", "<!-- results: decoding one -->: 'prompts'"),
    ("value: one settings.context .2f .3f", "<!-- value: one settings"),
  ],
)
def test_what_cannot_be_is_refused(folder, order, sentence):
  with pytest.raises(ValueError, match=sentence):
    fill(folder, order)


HEAD = '{"date": "", "versions": {}, "command": "", "measurement": %s}'


@pytest.mark.parametrize(
  "content", ["[]", "{", '{"date": 1}', HEAD % "{}", HEAD % "null"]
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path, content):
  (tmp_path / "one.json").write_text(content)
  with pytest.raises(ValueError, match=r"one\.json (is|was) no.*delete it"):
    reproduction.read(tmp_path, "one")


def test_a_goal_stands_beside_its_figure():
  assert summary.goal(1.1, 1.2) == "1.10 (goal 1.20)"
  assert summary.goal(1.3, 1.2) == "**1.30 (goal 1.20, missed)**"
  assert summary.goal(0.8, 0.88, most=False, form=".0%") == (
    "**80% (goal 88%, missed)**"
  )


def test_the_program_writes_pages_and_pictures(folder, monkeypatch, capsys):
  passes = document(runs=[], caveats=[], settings={
    "target": "t", "dtype": "float32", "context": 128,
  })  # fmt: skip
  (folder / "one.json").write_text(json.dumps(passes))
  page = folder / "page.md"
  page.write_text("<!-- results: picture t.png one --><!-- end -->")
  programs.run("report", f"--results={folder}", str(page))
  assert "![t](t.png)" in page.read_text()
  assert (folder / "t.png").stat().st_size > 10_000
  capsys.readouterr()
  programs.run("report", f"--results={folder}", str(page))
  assert not capsys.readouterr().out
  nowhere = folder / "nowhere"
  with pytest.raises(SystemExit, match="nowhere holds no results"):
    programs.run("report", f"--results={nowhere}", str(page))
  monkeypatch.chdir(folder)
  with pytest.raises(SystemExit, match="name pages"):
    programs.run("report", f"--results={folder}")


@pytest.mark.parametrize(
  "text",
  [
    "<!-- results: passes one --> kept <!-- value: one date --><!-- end -->",
    "<!-- value: one date --><!-- end --> kept <!-- results: passes one -->",
  ],
)
def test_a_region_without_its_end_is_refused(folder, text):
  with pytest.raises(ValueError, match="has no <!-- end -->"):
    regions.fill(text, Documents(folder))


@pytest.mark.parametrize(
  "gain, speeds, text",
  [
    ((1.1, 0.01), (1.5, 1.2), "block; k = 4: +10.0 ± 1.0 % tokens"),
    ((0.9, 0.01), (1.5, 1.2), "token; k = 4: -10.0"),
    ((1.01, 0.01), (1.5, 1.2), "either; k = 4"),
    ((1.1, 0.01), (1.5, 1.49), "1.49 ± 0.01, which cannot be told apart"),
  ],
)
def test_the_verdict_on_rules_is_computed(gain, speeds, text):
  runs = [
    {
      "k": 4,
      "comparison": {"rule": rule},
      "gain": dict(zip(("value", "error"), gain)),
      "speed": {"speedup": {"value": speed, "error": 0.01}},
    }
    for rule, speed in zip(("block", "rejection"), speeds)
  ]
  [answer] = [x.of for x in summary.ANSWERS if x.question.startswith("Block")]
  assert text in answer({"block": {"runs": runs}})


@pytest.mark.parametrize(
  "speeds, lost, short",
  [
    ({1: (1.5, 1.6), 4: (1.0, 0.98)}, "none", "none"),
    ({1: (1.5, 1.4), 4: (1.0, 0.96)}, "4", "1"),
    ({1: (0.9, 0.8), 4: (0.8, 0.5)}, "1, 4", "1, 4"),
  ],
)
def test_lengths_that_gain_too_little_are_named(speeds, lost, short):
  runs = [
    {"k": 2, "batch": batch, "speed": {"speedup": {"value": value}}} | length
    for batch, pair in speeds.items()
    for value, length in zip(pair, ({}, {"length": "adaptive"}))
  ]
  text = length_tables.lengths({"lengths_x": {"runs": runs}}, "lengths_x")
  assert f"decoding alone, rows: {lost}\n" in text
  assert text.endswith(f"the best number's, rows: {short}")


def test_what_ran_on_a_gpu_is_named():
  [answer] = [x.of for x in summary.ANSWERS if "GPU" in x.question]
  assert "nothing" in answer({"a": {"machine": {"backend": "cpu"}}})
  assert answer({"h100": {"machine": {"backend": "gpu"}}}) == "h100"
