"""Sweeps: what a file may say, what is measured, and the page of it."""

import functools
import json
import re
import shutil
import types

import pytest
from tensorboardX.proto import event_pb2

import programs
from documents import run
from specdec.benchmark import deployments, sweep_run, sweeps, timing
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.benchmark.sweep_run import Lengths, Rounds, SweepBench
from specdec.cli.sweep import shard_of
from specdec.report import tables
from specdec.roofline import hardware
from specdec.utils import files

POINTS = [{"k": 1, "batch": 2}, {"k": 0, "batch": 1}]


@pytest.fixture(scope="module", autouse=True)
def fake_machine():
  """No machine is measured, and passes need not be compiled to be timed."""

  def timer(model, params, batch, tokens, *_):  # less than any round takes
    return lambda: 1e-6 * (1 + 0.1 * batch * tokens)

  with pytest.MonkeyPatch.context() as patch:
    programs.fake_machine(patch)
    patch.setattr(timing, "pass_timer", timer)
    patch.setattr(timing, "forget_programs", lambda: None)
    yield


def run_sweep(folder, target, points, *arguments):
  path = folder / "points.py"
  common = {"target": str(target), "drafter": "early_exit(1)"}
  config = {
    "whole": {"context": 8, "texts": 2, "pairs": 2},
    "common": common | {"max_new_tokens": 8},
    "points": points,
    "calibrate": {"batch": 1, "k": (2,), "max_new_tokens": 4},
  }
  path.write_text(
    "from ml_collections import ConfigDict\n"
    f"def get_config():\n  return ConfigDict({config!r})\n"
  )
  output = f"--output={folder / 'out'}"
  repeats = "--calibration_repeats=2"
  programs.run("sweep", f"--sweep={path}", output, repeats, *arguments)


def read_json(folder, name):
  return json.loads((folder / "out" / f"{name}.json").read_text())


def lines_of(folder):
  text = (folder / "out" / "lines.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, target):
  """A folder with both points."""
  folder = tmp_path_factory.mktemp("measured")
  with programs.waits() as waits:
    run_sweep(folder, target, POINTS)
  assert waits == ["compiling batch 2, k = 1", "compiling batch 1, k = 0"]
  return folder


@pytest.fixture
def sweep(tmp_path, target, measured):
  """Sweeps in a copy of that folder."""
  shutil.copytree(measured / "out", tmp_path / "out")
  return functools.partial(run_sweep, tmp_path, target)


@pytest.fixture
def calibrated_sweep(sweep, tmp_path):
  """The same, calibrated but without a point."""
  (tmp_path / "out" / "lines.jsonl").unlink()
  return sweep


def test_points_and_their_predictions(measured):
  lines = lines_of(measured)
  assert [line["run"]["k"] for line in lines] == [1, 0]
  for line in lines:
    run, prediction = line["run"], line["prediction"]
    assert run["speed"]["tokens"] == 2 * 8 * (2 if run["batch"] == 2 else 1)
    assert line["observed"]["rounds"] >= 8 / (1 + run["k"])
    assert prediction["seconds"] > 0 and line["context"] >= 16
    assert prediction["speedup"] == pytest.approx(
      prediction["baseline_seconds"] / prediction["seconds"]
    )
  assert lines[1]["prediction"]["speedup"] == 1
  # What was counted is what was decoded: these texts are greedy.
  rate = lines[0]["run"]["acceptance"]["prefix_acceptance"][0]["value"]
  assert lines[0]["observed"]["prefix_acceptance"][0] == pytest.approx(rate)
  calibration = read_json(measured, "calibration")
  assert len(calibration["fits"]) == 2
  [overhead] = calibration["overhead"].values()
  # Rounds of texts half as long, in smaller caches.
  assert {(b, k, slots) for b, k, slots, _ in overhead["times"]} == {
    (1, 0, 16), (1, 2, 16),
  }  # fmt: skip
  assert {line["context"] for line in lines} == {32}


def events_of(folder):
  """(step, name, value) of every scalar of TensorBoard's files of a folder."""
  scalars = []
  for file in sorted(folder.iterdir()):
    data = file.read_bytes()
    while data:  # size, its checksum, the event, its checksum
      size = int.from_bytes(data[:8], "little")
      event = event_pb2.Event.FromString(data[12 : 12 + size])
      found = event.summary.value
      scalars += [(event.step, x.tag, x.simple_value) for x in found]
      data = data[16 + size :]
  return scalars


def test_tensorboard_has_a_run_for_every_setting_and_batch(
  sweep, tmp_path, target
):
  folder = tmp_path / "out" / "tensorboard"
  for _ in range(2):  # the second time voids and repeats what is there
    two, one = sorted(folder.iterdir(), key=lambda x: x.name, reverse=True)
    assert two.name.endswith("; batch 2") and one.name.endswith("; batch 1")
    line = lines_of(tmp_path)[0]
    last = {name: (step, value) for step, name, value in events_of(two)}
    speedup = line["run"]["speed"]["speedup"]["value"]
    assert last["speedup/measured"] == (1, pytest.approx(speedup))
    predicted = line["prediction"]["speedup"]
    assert last["speedup/predicted"] == (1, pytest.approx(predicted))
    assert all(step == 0 for step, *_ in events_of(one))
    sweep(POINTS)


@pytest.mark.slow
def test_other_settings_are_calibrated_too_and_counted_with_other_noise(
  sweep, tmp_path, monkeypatch
):
  numbers, complete = [], Decoder.complete

  def spy(self, batch):
    numbers.append((self.num_nodes == 1, tuple(batch.numbers)))
    return complete(self, batch)

  monkeypatch.setattr(Decoder, "complete", spy)
  before = read_json(tmp_path, "calibration")
  sampled = {"batch": 2, "temperature": 1.0, "acceptance": "rejection"}
  sweep([{"k": 1, **sampled}, {"k": 1, "drafter": "lookup(min_ngram=1)"}])
  after = read_json(tmp_path, "calibration")
  assert after["fits"] == before["fits"] and len(after["overhead"]) == 3
  *_, lookup = lines = lines_of(tmp_path)
  assert len(lines) == 4 and all("run" in line for line in lines)
  assert 0 <= lookup["observed"]["wide"] <= 1
  # Two turns are timed: numbers 0 to 3. Three others are counted.
  timed = [(0, 1), (2, 3)]
  assert numbers[:3] == [(False, (4, 5)), (False, (6, 7)), (False, (8, 9))]
  assert sorted(numbers[3:7]) == [(p, n) for p in (False, True) for n in timed]


def test_synthetic_texts_are_counted_as_they_are_timed(sweep, tmp_path):
  """Their rounds follow from their numbers, at temperature 0 as well."""
  (tmp_path / "out" / "run.json").unlink()
  sweep([{"k": 1, "batch": 1, "acceptance": "synthetic(0.5)"}], "--pairs=6")
  *_, line = lines_of(tmp_path)
  turns = 3  # of two texts one by one
  assert line["observed"]["rounds"] == line["rounds"] / turns


def test_a_killed_sweep_goes_on_and_repeats_nothing(
  sweep, tmp_path, monkeypatch, capsys
):
  path = tmp_path / "out" / "lines.jsonl"
  first = path.read_text().splitlines(keepends=True)[0]
  path.write_text(first + '{"point": {"k"')  # killed while writing
  done, measure = [], SweepBench.measure
  monkeypatch.setattr(
    SweepBench, "measure", lambda *args: done.append(1) or measure(*args)
  )
  sweep(POINTS)
  assert len(done) == 1
  assert path.read_text().startswith(first + '{"point": {"k"\n')
  read = sweeps.read([tmp_path / "out"])
  assert len(read.lines) == 2 and "line 2" in read.broken[0]
  printed = capsys.readouterr().out
  for line in read.lines:
    assert f"{line['prediction']['speedup']:.2f}" in printed


def test_a_point_that_fails_is_written_down_and_the_others_go_on(
  calibrated_sweep, tmp_path, monkeypatch
):
  measure = SweepBench.measure

  def fails(bench, point, *args):
    if point.setup.k == 1:
      raise RuntimeError("no more memory")
    return measure(bench, point, *args)

  with monkeypatch.context() as patch:
    patch.setattr(SweepBench, "measure", fails)
    with pytest.raises(SystemExit, match=f"1 of {len(POINTS)} points failed"):
      calibrated_sweep(POINTS)
  lines = lines_of(tmp_path)
  assert lines[0]["error"] == "RuntimeError: no more memory"
  assert "run" in lines[1]
  with pytest.raises(SystemExit, match="1 of"):
    calibrated_sweep(POINTS)
  assert len(lines_of(tmp_path)) == 2  # not tried again
  calibrated_sweep(POINTS, "--retry")
  assert "run" in lines_of(tmp_path)[2]
  read = sweeps.read([tmp_path / "out"])
  assert len(read.lines) == 2 and not read.failed


def test_a_point_whose_drafter_was_edited_is_measured_anew(tmp_path):
  drafter, done = tmp_path / "mine.py", []

  def measure(point, *_):
    done.append(point.settings["drafter"])
    return {"run": {}}

  points = [{"drafter": f"{drafter}:mine"}, {"drafter": "lookup"}]
  for text in ("# as it was", "# as it was", "# edited"):
    drafter.write_text(f"def mine(k):\n  pass {text}\n")
    lines = files.Lines(tmp_path / "lines.jsonl")
    read = sweep_run.points_of({"points": points}, mesh=None, prompt_size=8)
    bench = types.SimpleNamespace(measure=measure)
    assert len(sweep_run.measure_all(bench, read, lines)) == 2
  assert done == [f"{drafter}:mine", "lookup", f"{drafter}:mine"]


def test_a_point_whose_texts_were_edited_is_measured_anew(tmp_path):
  prompts, done = tmp_path / "prompts.jsonl", []

  def measure(point, *_):
    done.append(point.settings.get("prompt_file"))
    return {"run": {}}

  texts = {"drafter": "lookup", "prompt_file": [str(prompts)]}
  for text in ("as it was", "as it was", "edited"):
    prompts.write_text(f'{{"prompt": "{text}"}}\n')
    points = {"points": [texts, {"drafter": "lookup"}]}
    read = sweep_run.points_of(points, mesh=None, prompt_size=8)
    bench = types.SimpleNamespace(measure=measure)
    lines = files.Lines(tmp_path / "lines.jsonl")
    assert len(sweep_run.measure_all(bench, read, lines)) == 2
  assert [bool(files) for files in done] == [True, False, True]


def test_a_drafter_edited_while_it_is_swept_is_what_was_read(tmp_path):
  """What runs was imported before; its lines must not be those of the edit."""
  drafter, lines = tmp_path / "mine.py", files.Lines(tmp_path / "lines.jsonl")
  drafter.write_text("def mine(k):\n  pass\n")
  points = [{"drafter": f"{drafter}:mine", "k": k} for k in (1, 2)]
  read = sweep_run.points_of({"points": points}, mesh=None, prompt_size=8)

  def measure(point, *_):
    drafter.write_text("def mine(k):\n  pass  # edited\n")
    return {"run": {}}

  bench = types.SimpleNamespace(measure=measure)
  assert len(sweep_run.measure_all(bench, read, lines)) == 2
  one, other = (line["file_checksums"] for line in lines.entries)
  assert one == other == read[0].checksums


@pytest.mark.slow
def test_no_time_may_beat_its_bytes(calibrated_sweep, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(hardware, "measure_bandwidth", lambda *_, **__: 1.0)
    with pytest.raises(SystemExit, match="1 of 1 points failed"):
      calibrated_sweep(POINTS[:1])
    (tmp_path / "out" / "calibration.json").rename(tmp_path / "kept.json")
    with pytest.raises(SystemExit, match="1 of 1 points failed"):
      calibrated_sweep(POINTS[1:])
    (tmp_path / "kept.json").rename(tmp_path / "out" / "calibration.json")
  for line in lines_of(tmp_path):
    assert "Impossible" in line["error"]
  # Slightly under its bytes it is kept with a caveat.
  monkeypatch.setattr(
    timing.Limit, "check", lambda self, what, *_: f"{what} was too fast"
  )
  calibrated_sweep(POINTS[:1], "--retry")
  *_, line = lines_of(tmp_path)
  assert line["run"]["k"] == 1
  assert line["caveats"] == [
    "a round of k = 1 was too fast",
    "a baseline round was too fast",
  ]


def test_what_is_measured_is_predicted_again(sweep, tmp_path, monkeypatch):
  before = lines_of(tmp_path)
  for place, name in (
    (timing, "pass_timer"),
    (timing, "round_timer"),
    (Decoder, "complete"),
  ):
    monkeypatch.setattr(place, name, None)  # nothing is timed or decoded again
  sweep(POINTS, "--repredict")
  after = lines_of(tmp_path)
  assert after[:2] == before
  for old, new in zip(before, after[2:]):
    assert new["run"] == old["run"] and new["date"] == old["date"]
    assert new["prediction"] == old["prediction"]  # of the same calibration
  assert len(sweeps.read([tmp_path / "out"]).lines) == 2


def test_a_prediction_is_of_the_bandwidth_around_its_point(
  sweep, tmp_path, monkeypatch
):
  path = tmp_path / "out" / "calibration.json"
  assert all(json.loads(path.read_text())["bandwidth"].values())
  bandwidths, pair_of = [], deployments.pair_of

  def recorded(*arguments):
    bandwidths.append(arguments[3])
    return pair_of(*arguments)

  monkeypatch.setattr(deployments, "pair_of", recorded)
  sweep(POINTS, "--repredict")
  measured = [line["bandwidth"] for line in lines_of(tmp_path)[: len(POINTS)]]
  assert bandwidths == measured == len(POINTS) * [1e15]


def parse(sweep):
  """As the program reads a file."""
  rounds = Rounds(**sweep_run.numbers_of(sweep, "calibrate", Rounds))
  lengths = Lengths(**sweep_run.numbers_of(sweep, "whole", Lengths))
  for point in sweep_run.points_of(sweep):
    sweep_run.check(point, rounds, lengths)


@pytest.mark.parametrize(
  "part, value, sentence",
  [
    ("points", [], "has no points, a list of dicts"),
    ("points", [{"k": 1}, {"k": 1}], "twice"),
    (
      "points",
      [{"temperature": 1, "top_p": x} for x in (1, 1.0)],
      "twice",
    ),
    ("points", [{"kk": 0}], "points[0] sets 'kk'; did you mean k"),
    ("points", [{"temperature": "hot"}], "points[0]: temperature = 'hot'; it"),
    ("points", [{"k": 1, "shape": "chains(2)"}], "calibration is of chains"),
    ("points", [{"chat": True}], "points[0]: chat is for prompt_file"),
    (
      "points",
      [{"k": 2, "batch": 3, "max_new_tokens": 64}],
      "batch 3 with k = 2 is evaluated and is among",
    ),
    ("points", [{"k": 1, "batch": 7}], "no multiple of the batch 7"),
    ("common", {"dtype": "float16"}, "points[0]: dtype: did you mean"),
    ("common", [1], "common is [1]; it must be a dict"),
    ("whole", {"texts": "many"}, "whole sets texts = 'many'"),
    ("calibrate", {"k": "auto"}, "calibrate sets k = 'auto'"),
    ("calibrate", {"k": 64}, "no room for a round of k = 64"),
    ("comon", {"k": 1}, "the sweep sets 'comon'; did you mean common"),
  ],
)
def test_what_a_sweep_file_may_not_say(part, value, sentence):
  sweep = {"points": [{"k": 1}], "calibrate": {"max_new_tokens": 64}}
  if part == "calibrate":
    value = {"max_new_tokens": 64} | value
  with pytest.raises(ValueError, match=re.escape(sentence)):
    parse(sweep | {part: value})


@pytest.mark.parametrize(
  "points, arguments, sentence",
  [
    (
      [{"drafter": "lokup"}],
      [],
      "points[0]: no drafter lokup; did you mean look",
    ),
    (POINTS, ["--draft_ways=1"], "is a setting of the points"),
    (POINTS, ["--pairs=0"], "--pairs=0"),
    (POINTS, ["--texts=3"], "no multiple of the batch 2"),
  ],
)
def test_the_program_refuses_before_models_are_loaded(
  tmp_path, target, monkeypatch, points, arguments, sentence
):
  monkeypatch.setattr(Setup, "load_target", None)
  with pytest.raises(SystemExit, match=re.escape(sentence)):
    run_sweep(tmp_path, target, points, *arguments)


def test_only_files_that_a_flag_takes_are_listed():
  configs = programs.SCRIPTS.parent / "configs"
  for program, flag, folder in (
    ("sweep", "sweep", "sweeps"),
    ("generate", "config", "."),
  ):
    with pytest.raises(SystemExit) as error:
      programs.run(program, f"--{flag}=absent.py")
    listed = str(error.value).partition("known: ")[2].split(", ")
    assert sorted(listed) == sorted(map(str, (configs / folder).glob("*.py")))


def test_machines_share_a_sweep():
  assert [shard_of([0, 1, 3], f"{i}/2") for i in (0, 1)] == [[0, 3], [1]]
  for shard in ("2/2", "-1/2", "1", "a/b", "0/0"):
    with pytest.raises(ValueError, match="must be I/N with 0 <= I < N"):
      shard_of([0, 1, 3], shard)


@pytest.fixture
def report(capsys):
  def call(*arguments):
    capsys.readouterr()
    programs.run("report", *arguments)
    return capsys.readouterr()

  return call


def line(k, batch, measured, predicted, **point):
  return {
    "point": {"k": k, "batch": batch, "target": "t<b>", **point},
    "drafter": point.get("drafter", "a draft"),
    "caveats": [],
    "load": 1.0,
    "context": 64,
    "rounds": 5,
    "run": run("all", k, batch, 1.5, measured, 0.1),
    "prediction": {"speedup": predicted, "round_seconds": 0.1},
    "observed": {"prefix_acceptance": [0.5] * k, "wide": 1.0},
  }


def test_theorem_3_8_by_alpha_and_c():
  # Their EnDe row of T5-small at temperature 0.
  one = line(7, 1, 3.4, 3.0)
  one["run"]["acceptance"]["alpha"] = {"value": 0.75, "error": None}
  assert sweeps.by_formula(one) is None  # of a sweep that did not write c
  one["prediction"]["cost"] = 0.02
  expected = (1 - 0.75**8) / (0.25 * (7 * 0.02 + 1))
  assert sweeps.by_formula(one) == pytest.approx(expected)
  table = tables.of_sweep([one | {"caveats": []}])
  assert table.splitlines()[-1].split()[7:10] == ["0.75", "0.02", "3.16"]
  assert sweeps.of_formula(one) == pytest.approx(3.4 / expected)
  one["observed"]["wide"] = 0.4  # it did not draft in every round
  assert sweeps.by_formula(one) is sweeps.of_formula(one) is None
  assert sweeps.formula_ratios([one]) == []
  zero = line(0, 1, 1.0, 1.0)
  zero["prediction"]["cost"] = 0.0
  assert sweeps.by_formula(zero) is None


def write_lines(folder, lines):
  folder.mkdir()
  text = "".join(json.dumps(x) + "\n" for x in lines)
  (folder / "lines.jsonl").write_text(text)
  return folder


def test_the_page_holds_all_of_it_and_asks_nothing_of_the_network(
  report, tmp_path
):
  lines = [
    line(k, batch, 1 + 0.1 * k / batch, 1 + 0.1 * k / batch * (1 + (k == 2)))
    for k in range(3)
    for batch in (1, 4)
  ]
  large = [line(k, 1, 1.2, 1.2, drafter="large") for k in (1, 2)]
  folders = [
    str(write_lines(tmp_path / "a", lines)),
    str(write_lines(tmp_path / "b", large)),
  ]
  lines, pictures, page = lines + large, tmp_path / "pictures", tmp_path / "p"
  printed = report(*folders, f"--pictures={pictures}", f"--page={page}")
  names = {path.stem for path in pictures.iterdir()}
  assert names == {
    "scatter", "over_k_0", "over_k_1", "heatmap_0", "prefix_acceptance",
    "drafters_0",
  }  # fmt: skip
  assert "all: 7 of 8 cells within 0.90 to 1.10" in printed.out
  page = page.read_text()
  assert "t&lt;b&gt;" in page and "t<b>" not in page
  assert page.count("<tr>") == 1 + len(lines)
  assert page.count("<img") == len(names)
  assert not re.search(r"(src|href)=\"(?!data:)", page)
  assert '<meta name="viewport" content="width=device-width' in page
  assert "@media (prefers-color-scheme: dark)" in page


def test_lines_of_other_meshes_are_other_points(measured, tmp_path):
  *_, line = lines_of(measured)
  assert line["mesh"] is None
  other = tmp_path / "other.jsonl"
  other.write_text(json.dumps(line | {"mesh": "model:8"}) + "\n")
  assert len(sweeps.read([measured / "out", other]).lines) == 3


def test_a_point_of_several_sweeps_is_pooled(tmp_path):
  folders = []
  for i, (seconds, baseline, ours, theirs) in enumerate(
    [(2.0, 3.0, 1.0, 2.0), (4.0, 3.0, 3.0, 3.0)]
  ):
    one = line(1, 1, baseline / seconds, theirs / ours)
    times = {"seconds": seconds, "baseline_seconds": baseline}
    one["run"]["speed"] |= times | {
      "tokens": 60,
      "baseline_tokens": 60,
      "prefill_seconds": 0.5,
      "baseline_prefill_seconds": 0.5,
    }
    one["prediction"] |= {"seconds": ours, "baseline_seconds": theirs}
    one["load"] = 1.0 + i
    folders.append(write_lines(tmp_path / str(i), [one, one]))
  [pooled] = sweeps.read(folders).lines
  assert pooled["run"]["speed"]["speedup"]["value"] == pytest.approx(6 / 6)
  assert pooled["run"]["speed"]["speedup"]["error"] > 0.2
  assert pooled["prediction"]["speedup"] == pytest.approx(5 / 4)
  assert (pooled["rounds"], pooled["load"], pooled["sweeps"]) == (10, 2.0, 2)
  file = folders[0] / "lines.jsonl"  # of another version of a drafter
  file.write_text(
    "".join(
      json.dumps(json.loads(line) | {"file_checksums": {"mine.py": 1}}) + "\n"
      for line in file.read_text().splitlines()
    )
  )
  assert len(sweeps.read(folders).lines) == 2
  [alone] = sweeps.read(folders[:1]).lines
  assert alone["run"]["speed"]["speedup"]["value"] == 1.5


def test_a_predicted_speedup_below_zero_is_not_reported(tmp_path):
  lines = [line(1, 1, 1.2, 1.1), line(2, 1, 1.2, -0.68)]
  read = sweeps.read([write_lines(tmp_path / "a", lines)])
  assert [x["run"]["k"] for x in read.lines] == [1]
  for part in ("line 2", "-0.68", "--repredict"):
    assert part in read.broken[0]


def test_bands_and_crossovers():
  lines = [
    line(1, batch, gain, predicted)
    for batch, gain, predicted in (
      (1, 1.3, 1.2),
      (2, 0.995, 1.1),
      (4, 0.8, 1.0),
    )
  ]
  band = sweeps.band(lines)
  assert (band.cells, band.within) == (3, 2)
  assert band.least == pytest.approx(0.8)
  assert sweeps.crossover(lines) == (4, 2)
  assert sweeps.crossover(lines[:1]) == (None, None)
  # A gain within its error is none; a sure one at 4, and 2 is no crossover.
  lines += [line(2, 4, 1.01, 0.9), line(0, 8, 1.0, 1.0)]
  assert sweeps.crossover(lines) == (4, 2)
  assert sweeps.crossover([*lines, line(3, 4, 1.3, 0.9)]) == (4, None)


def test_what_cannot_be_reported_is_refused(report, tmp_path):
  for argument, sentence in (
    ([], "give a folder"),
    ([str(tmp_path / "absent")], "absent does not exist"),
    ([str(write_lines(tmp_path / "empty", []))], "no measured point"),
    ([str(write_lines(tmp_path / "b", [[1], {}]))], "no measured point"),
  ):
    with pytest.raises(SystemExit, match=sentence):
      report(*argument)
  assert not list(tmp_path.glob("*/report.html"))
