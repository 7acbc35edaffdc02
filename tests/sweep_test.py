"""scripts/sweep.py and report.py as their users meet them, on tiny models."""

import base64
import json
import re

import pytest

import programs
from specdec.benchmark import sweeps, timing
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.benchmark.sweep_run import Bench
from specdec.roofline import hardware


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return programs.write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def known_hardware(monkeypatch):
  """No machine is measured, and passes need not be compiled to be timed."""
  programs.fake_machine(monkeypatch)

  def timer(model, params, batch, tokens, *_):  # less than any round takes
    return lambda: 1e-6 * (1 + 0.1 * batch * tokens)

  monkeypatch.setattr(timing, "pass_timer", timer)


def write_sweep(folder, target, points, calibrated=((1, 2), (2,), 4)):
  path = folder / "points.py"
  path.write_text(
    "from ml_collections import ConfigDict\n"
    "def get_config():\n"
    "  config = ConfigDict()\n"
    "  config.whole = {'context': 8, 'texts': 2, 'pairs': 2}\n"
    f"  config.common = {{'target': {str(target)!r},"
    " 'drafter': 'early_exit(1)',"
    " 'max_new_tokens': 8}\n"
    f"  config.points = {points!r}\n"
    f"  config.calibrate = {{'batch': {calibrated[0]}, 'k': {calibrated[1]},"
    f" 'max_new_tokens': {calibrated[2]}}}\n"
    "  return config\n"
  )
  return path


@pytest.fixture
def sweep(tmp_path, target, capsys):
  def call(points, *arguments, **options):
    path = write_sweep(tmp_path, target, points, **options)
    capsys.readouterr()
    programs.run(
      "sweep",
      f"--sweep={path}",
      f"--output={tmp_path / 'out'}",
      "--calibration_repeats=2",
      *arguments,
    )
    return capsys.readouterr().out

  return call


def lines_of(folder):
  text = (folder / "out" / "lines.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


POINTS = [{"k": 1, "batch": 2}, {"k": 0, "batch": 1}]


def test_other_settings_of_a_known_target_are_calibrated_beside_it(
  sweep, tmp_path
):
  points = [
    {"k": 1, "temperature": 1.0, "acceptance": "rejection"},
    {"k": 1, "drafter": "lookup(min_ngram=1)"},
  ]
  short = {"calibrated": ((1,), (2,), 4)}
  sweep(POINTS[:1], **short)
  first = json.loads((tmp_path / "out" / "calibration.json").read_text())
  sweep(points, **short)
  lines = lines_of(tmp_path)
  assert len(lines) == 3 and all("run" in line for line in lines)
  second = json.loads((tmp_path / "out" / "calibration.json").read_text())
  assert second["fits"] == first["fits"] and len(second["overhead"]) == 3
  assert 0 <= lines[2]["observed"]["wide"] <= 1


def test_sampled_texts_are_counted_with_other_noise(
  sweep, tmp_path, monkeypatch
):
  seen = []
  complete = Decoder.complete

  def spy(self, batch):
    seen.append((self.num_nodes == 1, tuple(batch.numbers)))
    return complete(self, batch)

  monkeypatch.setattr(Decoder, "complete", spy)
  sweep([{"k": 1, "batch": 2, "temperature": 1.0, "acceptance": "rejection"}])
  # Two turns are timed: numbers 0 to 3. Three others are counted.
  timed = [(0, 1), (2, 3)]
  assert seen[:3] == [(False, (4, 5)), (False, (6, 7)), (False, (8, 9))]
  assert sorted(seen[3:]) == [(p, n) for p in (False, True) for n in timed]


def test_synthetic_texts_are_counted_as_they_are_timed(sweep, tmp_path):
  """Their rounds follow from their numbers, at temperature 0 as well."""
  rates = {"acceptance": "synthetic(0.5)"}
  sweep([{"k": 1, "batch": 1, **rates}], "--pairs=6")
  [line] = lines_of(tmp_path)
  turns = 3  # of two texts one by one
  assert line["observed"]["rounds"] == line["rounds"] / turns


def test_points_and_their_predictions(sweep, tmp_path):
  with programs.waits() as waits:
    printed = sweep(POINTS)
  assert waits == ["compiling batch 2, k = 1", "compiling batch 1, k = 0"]
  lines = lines_of(tmp_path)
  assert [line["run"]["k"] for line in lines] == [1, 0]
  for line in lines:
    run, said = line["run"], line["prediction"]
    assert run["speed"]["tokens"] == 2 * 8 * (2 if run["batch"] == 2 else 1)
    assert line["observed"]["rounds"] >= 8 / (1 + run["k"])
    assert said["seconds"] > 0 and line["context"] >= 16
    assert said["speedup"] == pytest.approx(
      said["baseline_seconds"] / said["seconds"]
    )
    assert f"{said['speedup']:.2f}" in printed
  assert lines[1]["prediction"]["speedup"] == 1
  # What was counted is what was decoded: these texts are greedy.
  measured = lines[0]["run"]["acceptance"]["prefix_acceptance"][0]["value"]
  assert lines[0]["observed"]["prefix_acceptance"][0] == pytest.approx(measured)
  calibrated = json.loads((tmp_path / "out" / "calibration.json").read_text())
  assert len(calibrated["fits"]) == 2
  [overhead] = calibrated["overhead"].values()
  assert {(b, k) for b, k, *_ in overhead["times"]} == {
    (b, k) for b in (1, 2) for k in (0, 2)
  }
  # Rounds of texts half as long, in smaller caches.
  assert {slots for _, _, slots, _ in overhead["times"]} == {16}
  assert {line["context"] for line in lines} == {32}


def test_a_killed_sweep_goes_on_and_repeats_nothing(
  sweep, tmp_path, monkeypatch
):
  sweep(POINTS[:1])
  before = (tmp_path / "out" / "lines.jsonl").read_text()
  path = tmp_path / "out" / "lines.jsonl"
  path.write_text(before + '{"point": {"k"')  # killed while writing
  done, measure = [], Bench.measure
  monkeypatch.setattr(
    Bench, "measure", lambda *args: done.append(1) or measure(*args)
  )
  sweep(POINTS)
  assert len(done) == 1
  text = path.read_text()
  assert text.startswith(before + '{"point": {"k"\n')  # never rewritten
  found = sweeps.read([tmp_path / "out"])
  assert len(found.lines) == 2 and "line 2" in found.broken[0]


def test_a_point_that_fails_is_written_down_and_the_others_go_on(
  sweep, tmp_path, monkeypatch
):
  measure = Bench.measure

  def fails(bench, point, *args):
    if point.setup.k == 1:
      raise RuntimeError("no more memory")
    return measure(bench, point, *args)

  monkeypatch.setattr(Bench, "measure", fails)
  printed = sweep(POINTS)
  assert "1 points failed" in printed
  lines = lines_of(tmp_path)
  assert lines[0]["error"] == "RuntimeError: no more memory"
  assert "run" in lines[1]
  monkeypatch.setattr(Bench, "measure", measure)
  sweep(POINTS)
  assert len(lines_of(tmp_path)) == 2  # not tried again
  sweep(POINTS, "--retry")
  assert "run" in lines_of(tmp_path)[2]
  found = sweeps.read([tmp_path / "out"])
  assert len(found.lines) == 2 and not found.failed


@pytest.mark.parametrize("which", ["calibration", "points"])
def test_no_time_may_beat_its_bytes(sweep, tmp_path, monkeypatch, which):
  if which == "points":
    sweep(POINTS[:1])
  monkeypatch.setattr(hardware, "measure_bandwidth", lambda *_, **__: 1.0)
  sweep(POINTS)
  assert "Impossible" in lines_of(tmp_path)[-1]["error"]


def test_a_time_slightly_under_its_bytes_is_kept_with_a_caveat(
  sweep, tmp_path, monkeypatch
):
  monkeypatch.setattr(
    timing.Limit, "check", lambda self, what, *_: f"{what} was too fast"
  )
  sweep(POINTS[:1])
  [line] = lines_of(tmp_path)
  assert line["run"]["k"] == 1
  assert line["caveats"] == [
    "a round of k = 1 was too fast",
    "a baseline round was too fast",
  ]


def test_what_is_measured_is_predicted_again(sweep, tmp_path, monkeypatch):
  sweep(POINTS)
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


def test_calibrated_texts_need_room_for_a_round(sweep):
  with pytest.raises(SystemExit, match="no room for a round of k = 5"):
    sweep(POINTS, calibrated=((1,), (5,), 4))


@pytest.mark.parametrize(
  "points, arguments, sentence",
  [
    ([], [], "has no points"),
    ([{"k": 1}], ["--temperature=1"], "Unknown command line flag"),
    ([{"k": 1}], ["--draft_ways=1"], "is a setting of the points"),
    ([{"k": 1}], ["--pairs=0"], "--pairs=0"),
    (
      [{"k": 2, "batch": 2, "max_new_tokens": 4}],
      [],
      "batch 2 with k = 2 is evaluated and is among",
    ),
    ([{"k": 1, "shape": "chains(2)"}], [], "calibration is of chains"),
    ([{"k": 1}, {"k": 1}], [], "twice"),
    ([{"k": 1, "json": "x"}], [], "sets 'json'"),
    ([{"k": 1, "depth": 2}], [], "sets 'depth'"),
    ([{"k": -1}], [], "k = -1"),
    ([{"k": 1, "batch": 2}], ["--texts=3"], "no multiple of the batch 2"),
    ([{"k": "auto"}], [], "k = 'auto'; it must be an integer"),
  ],
)
def test_bad_sweeps_are_refused_at_once(sweep, points, arguments, sentence):
  with pytest.raises(SystemExit, match=re.escape(sentence)):
    sweep(points, *arguments)


@pytest.mark.parametrize(
  "part, value, sentence",
  [
    ("points", [{"drafter": "lokup"}], "points[0]: lokup; did you mean look"),
    (
      "points",
      [{"k": 1}, {"acceptance": "rejecton"}],
      "points[1]: rejecton; did you mean rejection?",
    ),
    ("points", [{"temperature": "hot"}], "points[0]: temperature = 'hot'; it"),
    ("points", [{"temperature": None}], "points[0]: temperature = None; it"),
    ("points", [{"kk": 0}], "points[0] sets 'kk'; did you mean k"),
    ("points", [3], "points[0] is 3; it must be a dict"),
    ("points", 3, "has no points, a list of dicts"),
    ("common", {"dtype": "float16"}, "points[0]: dtype: did you mean"),
    ("common", [1], "common is [1]; it must be a dict"),
    ("whole", {"texts": "many"}, "whole sets texts = 'many'"),
    ("whole", {"text": 2}, "whole sets 'text'; did you mean texts"),
    ("calibrate", {"batch": "one"}, "calibrate sets batch = 'one'"),
    ("calibrate", {"batch": []}, "calibrate sets batch = []"),
    ("calibrate", {"k": "auto"}, "calibrate sets k = 'auto'"),
    ("calibrate", {"batches": 1}, "calibrate sets 'batches'; did you mean"),
    ("comon", {"k": 1}, "the sweep sets 'comon'; did you mean common"),
  ],
)
def test_a_sweep_file_is_parsed_as_flags_before_models_are_loaded(
  tmp_path, monkeypatch, part, value, sentence
):
  monkeypatch.setattr(Setup, "load_target", None)
  path = tmp_path / "points.py"
  parts = {"points": [{"k": 1}], part: value}
  path.write_text(
    "from ml_collections import ConfigDict\n"
    f"def get_config():\n  return ConfigDict({parts!r})\n"
  )
  with pytest.raises(SystemExit, match=re.escape(sentence)):
    programs.run("sweep", f"--sweep={path}", f"--output={tmp_path / 'out'}")


@pytest.mark.parametrize(
  "program, flag, folder",
  [("sweep", "sweep", "sweeps"), ("generate", "config", ".")],
)
def test_only_files_that_a_flag_takes_are_listed(program, flag, folder):
  with pytest.raises(SystemExit) as error:
    programs.run(program, f"--{flag}=absent.py")
  listed = str(error.value).partition("known: ")[2].split(", ")
  configs = programs.SCRIPTS.parent / "configs"
  assert sorted(listed) == sorted(map(str, (configs / folder).glob("*.py")))


def test_one_integer_is_a_list_of_one(sweep, tmp_path):
  sweep([{"k": 0, "batch": 1}], calibrated=(1, 2, 4))
  [line] = lines_of(tmp_path)
  assert line["point"]["k"] == 0 and line["point"]["batch"] == 1
  assert "run" in line


@pytest.fixture
def report(capsys):
  def call(*arguments):
    capsys.readouterr()
    programs.run("report", *arguments)
    return capsys.readouterr()

  return call


def line(k, batch, measured, predicted, **point):
  estimate = {"value": measured, "error": 0.1}
  return {
    "point": {"k": k, "batch": batch, "target": "t<b>", **point},
    "drafter": point.get("drafter", "a draft"),
    "caveats": [],
    "load": 1.0,
    "context": 64,
    "rounds": 5,
    "run": {
      "k": k,
      "batch": batch,
      "acceptance": {
        "tokens_per_pass": {"value": 1.5, "error": None},
        "target_passes": 10,
      },
      "speed": {"speedup": estimate, "seconds": 1.0, "tokens_per_second": 9.0},
    },
    "prediction": {"speedup": predicted, "round_seconds": 0.1},
    "observed": {"prefix_acceptance": [0.5] * k, "wide": 1.0},
  }


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
  folder = write_lines(tmp_path / "a", lines)
  pictures = tmp_path / "pictures"
  said = report(str(folder), f"--pictures={pictures}")
  assert {path.stem for path in pictures.iterdir()} == {
    "scatter", "over_k_0", "heatmap_0", "prefix_acceptance",
  }  # fmt: skip
  assert "all: 5 of 6 cells within 0.90 to 1.10" in said.out
  page = (folder / "report.html").read_text()
  assert "t&lt;b&gt;" in page and "t<b>" not in page
  assert page.count("<tr>") == 1 + len(lines)
  assert page.count("<img") == 4  # scatter, over k, heatmap, prefix_acceptance
  assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_the_page_is_for_phones_and_for_the_dark(report, tmp_path):
  lines = [line(k, batch, 1.1, 1.2) for k in range(3) for batch in (1, 4)]
  report(str(write_lines(tmp_path / "a", lines)))
  page = (tmp_path / "a" / "report.html").read_text()
  assert '<meta name="viewport" content="width=device-width' in page
  assert "@media (prefers-color-scheme: dark)" in page
  found = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", page)
  assert len(found) == 4
  for data in found:
    svg = base64.b64decode(data).decode()
    # Text of 8.5 points or more is 9 pixels or more on a screen of 390.
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)[1])
    assert 8.5 * (390 - 2 * 16) / width >= 9
    # Neither the figure nor its panels have a ground.
    ground = re.search(r'<g id="patch_1">\s*<path[^>]*>', svg)[0]
    assert "fill: none" in ground or "opacity: 0" in ground


def test_sweeps_are_merged_and_the_drafts_compared(report, tmp_path):
  folders = [
    write_lines(
      tmp_path / draft, [line(k, 1, 1.2, 1.2, drafter=draft) for k in (1, 2)]
    )
    for draft in ("small", "large")
  ]
  page = tmp_path / "all.html"
  report(f"--page={page}", *map(str, folders))
  text = page.read_text()
  assert 'alt="drafters_0"' in text and text.count("<tr>") == 5


def test_machines_share_a_sweep(sweep, tmp_path):
  points = [{"k": 0}, {"k": 1}, {"k": 3}]
  folders = [tmp_path / "first", tmp_path / "second"]
  for i, folder in enumerate(folders):
    sweep(points, f"--shard={i}/2", f"--output={folder}")
  ks = [
    [line["point"]["k"] for line in sweeps.read(some).lines]
    for some in ([folders[0]], [folders[1]], folders)
  ]
  assert ks == [[0, 3], [1], [0, 3, 1]]
  for shard in ("2/2", "-1/2", "1", "a/b", "0/0"):
    with pytest.raises(SystemExit, match="must be I/N with 0 <= I < N"):
      sweep(points, f"--shard={shard}", f"--output={tmp_path / 'third'}")


def test_meshes_are_told_apart(sweep, tmp_path):
  sweep([{"k": 0}])
  [line] = lines_of(tmp_path)
  assert line["mesh"] is None
  other = tmp_path / "other.jsonl"
  other.write_text(json.dumps(line | {"mesh": "model:8"}) + "\n")
  assert len(sweeps.read([tmp_path / "out", other]).lines) == 2


def test_a_point_of_several_sweeps_is_pooled(tmp_path):
  folders = []
  for i, (seconds, baseline, ours, theirs) in enumerate(
    [(2.0, 3.0, 1.0, 2.0), (4.0, 3.0, 3.0, 3.0)]
  ):
    one = line(1, 1, baseline / seconds, theirs / ours)
    one["run"]["speed"] |= {
      "tokens": 60,
      "baseline_tokens": 60,
      "seconds": seconds,
      "baseline_seconds": baseline,
      "prefill_seconds": 0.5,
      "baseline_prefill_seconds": 0.5,
    }
    one["prediction"] |= {"seconds": ours, "baseline_seconds": theirs}
    one["load"] = 1.0 + i
    folders.append(write_lines(tmp_path / str(i), [one, one]))
  (found,) = sweeps.read(folders).lines
  assert found["run"]["speed"]["speedup"]["value"] == pytest.approx(6 / 6)
  assert found["run"]["speed"]["speedup"]["error"] > 0.2
  assert found["prediction"]["speedup"] == pytest.approx(5 / 4)
  assert (found["rounds"], found["load"], found["sweeps"]) == (10, 2.0, 2)
  (alone,) = sweeps.read(folders[:1]).lines
  assert alone["run"]["speed"]["speedup"]["value"] == 1.5


def test_a_predicted_speedup_below_zero_is_not_reported(tmp_path):
  lines = [line(1, 1, 1.2, 1.1), line(2, 1, 1.2, -0.68)]
  found = sweeps.read([write_lines(tmp_path / "a", lines)])
  assert [x["run"]["k"] for x in found.lines] == [1]
  assert "line 2" in found.broken[0] and "-0.68" in found.broken[0]
  assert "--repredict" in found.broken[0]


def test_bands_and_crossovers():
  lines = [
    line(1, batch, gain, said)
    for batch, gain, said in ((1, 1.3, 1.2), (2, 0.995, 1.1), (4, 0.8, 1.0))
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


def test_what_cannot_be_reported_is_said(report, tmp_path):
  with pytest.raises(SystemExit, match="give a folder"):
    report()
  with pytest.raises(SystemExit, match="absent does not exist"):
    report(str(tmp_path / "absent"))
  empty = write_lines(tmp_path / "empty", [])
  with pytest.raises(SystemExit, match="no measured point"):
    report(str(empty))
  (empty / "lines.jsonl").write_text('{"point": {}}\n[1]\nhalf')
  with pytest.raises(SystemExit, match="no measured point"):
    report(str(empty))
  assert not (empty / "report.html").exists()
