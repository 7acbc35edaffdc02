"""Measurements run one after another: kept, resumed, failing, forced."""

import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import programs
from specdec.benchmark import provenance, reproduction
from specdec.benchmark.measurements import FOUR_KINDS, MEASUREMENTS
from specdec.benchmark.measurements.measurement import Measurement
from specdec.benchmark.reproduction import Plan
from specdec.utils import run_folder

ROOT = programs.SCRIPTS.parent
# Counts in its folder how often it was started; `slow` waits the first time.
FAKE = """
import json, os, pathlib, sys, time
program, *flags = sys.argv[1:]
place = pathlib.Path(flags[-1].partition("=")[2])
folder = place if flags[-1].startswith("--output") else place.parent
starts = folder / "starts"
number = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(number))
if program == "bad":
  sys.exit("a sentence about what is wrong")
if program == "slow" and number == 1:
  (folder.parent / "waits").touch()
  time.sleep(60)
if program != "nothing":
  header = {"command": "x", "versions": {"commit": COMMIT}, "runs": []}
  header |= {"starts": number, "flags": flags, "prompts": ["long"]}
  header |= {"kernels": os.environ.get("SPECDEC_KERNELS"), "third": 1 / 3}
  header |= {"settings": {"json": "x", "k": 3}}
  (folder / "results.json").write_text(json.dumps(header))
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
  """A plan whose programs are fakes, on a quiet machine."""
  monkeypatch.setattr(provenance, "busy_cores", lambda: 0.1)
  fake = tmp_path / "fake.py"
  monkeypatch.setattr(provenance, "commit", lambda: "a commit")
  commit = f"COMMIT = {provenance.commit()!r}\n"
  fake.write_text(commit + textwrap.dedent(FAKE))
  return Plan(
    *(tmp_path / "results", tmp_path / "scratch", "P.jsonl"),
    launch=(sys.executable, str(fake)),
  )


def fake(name, program="good", **changes):
  return Measurement(name, f"{program} --k=1,2 --x", 1.0, **changes)


def run(plan, *measurements):
  """What failed, and what was reported."""
  plan.results.mkdir(exist_ok=True)
  reports = []
  return reproduction.run(measurements, plan, reports.append), reports


def starts(plan, name):
  return reproduction.read(plan.results, name)["starts"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: one.name)
def test_programs_have_the_flags_of_every_measurement(
  one, quick, monkeypatch, tmp_path
):
  if quick and one.quick is None:
    pytest.skip("a quick run leaves it out")
  monkeypatch.chdir(ROOT)
  program = importlib.import_module(f"specdec.cli.{one.program}").main
  argv = one.argv(tmp_path, FOUR_KINDS, quick)
  options = program.parse([one.program, *argv, f"--{one.to}=x"])
  names = [flag.partition("=")[0] for flag in argv]
  lists = {"--length", "--prompt_file"}
  once = [name for name in names if name not in lists]
  assert len(once) == len(set(once)) and len(argv) == len(set(argv))
  if one.program == "goodput":
    assert {"adaptive", "auto"} <= set(options.length)
  if one.name == "smollm2_repeated":
    assert len(options.prompt_file) == 2
  needed = {what for what, _ in one.needs}
  for path in getattr(options, "prompt_file", ()):
    assert path in needed or pathlib.Path(path).is_file()


def test_names_are_files_and_times_add_up_to_an_afternoon():
  names = [one.name for one in MEASUREMENTS]
  assert len(names) == len(set(names))
  bare = [one for one in MEASUREMENTS if not (one.needs or one.apart)]
  assert sum(one.minutes for one in bare) < 240
  kinds = [json.loads(x)["category"] for x in (ROOT / FOUR_KINDS).open()]
  assert sorted(set(kinds)) == ["chat", "code", "maths", "summarisation"]


def test_results_are_kept_compact_and_not_measured_twice(plan):
  one = fake("one", environment="SPECDEC_KERNELS=off")
  other = fake("other", flag="output")
  failed, reports = run(plan, one, other)
  assert not failed and len(reports) == 2
  assert "[2/2, 0.0 min, " in reports[1]
  document = reproduction.read(plan.results, "one")
  command = "SPECDEC_KERNELS=off python scripts/good.py --k=1,2 --x"
  assert document["command"] == command
  assert document["kernels"] == "off" and "prompts" not in document
  assert document["third"] == 0.333333
  assert document["settings"] == {"k": 3}
  about = document["measurement"]
  assert about["busy_cores"] == 0.1 and 0 < about["minutes"] < 1
  assert not (plan.scratch / "one").exists()

  assert run(plan, one, other) == ({}, ["one: kept", "other: kept"])
  # Another command is another measurement.
  run(plan, one._replace(line="good --k=3"))
  assert "--k=3" in reproduction.read(plan.results, "one")["flags"]


def test_what_is_named_or_of_another_commit_is_measured_again(plan):
  one, other = fake("one"), fake("other")
  run(plan, one, other)
  path = plan.results / "one.json"
  old = json.loads(path.read_text()) | {"starts": 7}
  path.write_text(json.dumps(old))
  _, [report] = run(plan._replace(forced=frozenset(["one"])), one)
  assert report.startswith("[1/1")
  assert starts(plan, "one") == 1
  old["versions"]["commit"] = "another"
  path.write_text(json.dumps(old))
  assert run(plan, one)[1] == ["one: kept"]
  _, reports = run(plan._replace(again=True), one, other)
  assert reports[0] == "other: kept" and starts(plan, "one") == 1


def test_quick_flags_take_the_place_of_others(plan):
  one = fake("one", quick="--k=9 --y=1")
  run(plan._replace(quick=True), one)
  document = reproduction.read(plan.results, "one")
  assert document["flags"][:3] == ["--k=9", "--x", "--y=1"]
  assert document["measurement"]["quick"]
  assert document["command"] == "python scripts/good.py --k=9 --x --y=1"


def test_a_failure_is_reported_and_the_others_go_on(plan):
  needy = fake("needy", needs=(("no/such/file", "make one"),))
  failed, reports = run(
    plan, fake("bad", "bad"), fake("none", "nothing"), needy, fake("one")
  )
  assert failed["bad"] == "a sentence about what is wrong"
  assert "no results" in failed["none"]
  assert "needy: skipped, no/such/file is not here: make one" in reports
  assert starts(plan, "one") == 1
  assert reproduction.read(plan.results, "bad") is None


def test_a_busy_machine_is_waited_for_and_then_named(plan, monkeypatch):
  monkeypatch.setattr(provenance, "busy_cores", lambda: 1.5)
  _, reports = run(plan._replace(patience=0), fake("one"))
  assert "others keep 1.5 cores busy" in reports[1]
  about = reproduction.read(plan.results, "one")["measurement"]
  assert about["busy_cores"] == 1.5


def test_a_killed_run_goes_on_where_it_was(plan, tmp_path):
  one = fake("one", "slow", flag="output")
  script = (
    "import pathlib, signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from specdec.benchmark import provenance, reproduction\n"
    "from specdec.benchmark.measurements.measurement import Measurement\n"
    "from pathlib import PosixPath\n"
    "provenance.busy_cores = lambda: 0.0\n"
    "provenance.commit = lambda: 'a commit'\n"
    f"plan = reproduction.{plan!r}\n"
    f"reproduction.run([{one!r}], plan, print)\n"
  )
  plan.results.mkdir()
  process = subprocess.Popen([sys.executable, "-c", script])
  while not (plan.scratch / "waits").exists():
    assert process.poll() is None
    time.sleep(0.05)
  process.send_signal(signal.SIGINT)
  assert process.wait() != 0
  assert not (plan.results / "one.json").exists()
  run(plan, one)
  assert starts(plan, "one") == 2  # in the folder of the first time
  # Of other sources, or flags, it begins anew.
  (plan.scratch / "one").mkdir()
  (plan.scratch / "one" / "starts").write_text("5")
  (plan.scratch / "one" / "begun.json").write_bytes(b"\xff\xfe")  # damaged
  forced = plan._replace(forced=frozenset(["one"]))
  run(forced, fake("one", flag="output"))
  assert starts(plan, "one") == 1


def test_a_measurement_outlives_its_parent_with_the_lock(plan):
  one = fake("one", "slow", flag="output")
  run_folder.lock(plan.scratch)
  (plan.scratch / "one").mkdir()
  with open(os.devnull, "w") as log:
    child = plan.start(one, log)
  run_folder.release()  # as a kill of this process would
  with pytest.raises(BlockingIOError, match="is in use by process"):
    run_folder.lock(plan.scratch)
  child.kill()
  child.wait()
  run_folder.lock(plan.scratch)
  run_folder.release()


def test_what_was_begun_with_changed_sources_begins_anew(plan, monkeypatch):
  one, begun = fake("one"), plan.scratch / "one"
  for commit, expected in (("a commit", 6), ("a commit-dirty", 1), (None, 1)):
    monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
    begun.mkdir(parents=True)
    (begun / "starts").write_text("5")
    stamp = json.dumps([commit, plan.command(one)])
    (begun / "begun.json").write_text(stamp)
    run(plan._replace(forced=frozenset(["one"])), one)
    assert starts(plan, "one") == expected


def test_a_document_is_kept_whatever_its_texts_hold():
  document = {"x": ["a],", "b", '},{"'], "runs": [{"k": 1}, {"k": 2}], "n": []}
  assert json.loads(reproduction._text(document)) == document


def test_the_program_lists_and_refuses(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  programs.run("reproduce", "--list", "--only=papers")
  printed = capsys.readouterr().out
  assert "  python scripts/roofline.py --papers\n1 measurements" in printed
  with pytest.raises(SystemExit, match="did you mean papers"):
    programs.run("reproduce", "--only=paper")
  with pytest.raises(SystemExit, match="--only= names nothing"):
    programs.run("reproduce", "--list", "--only=")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match="at the root of a checkout"):
    programs.run("reproduce")


def test_the_program_runs_a_measurement(tmp_path):
  """A whole process of a real one, and its exit status."""
  (tmp_path / "configs").symlink_to(ROOT / "configs")
  names = os.environ | {"PYTHONPATH": str(ROOT)}
  flags = "--quick", "--only=papers", "--patience=0"
  ended = programs.launch("reproduce", *flags, cwd=tmp_path, env=names)
  assert ended.returncode == 0, ended.stderr
  path = tmp_path / "runs" / "quick" / "papers.json"
  document = json.loads(path.read_text())
  assert "Leviathan" in document["tables"][0]
  assert document["command"] == "python scripts/roofline.py --papers"
