"""report --csv writes a row for every run, whatever program it is from."""

import csv
import json

import pytest

import programs
from documents import run
from report_picture_test import document
from specdec.report import csv_rows


def line(k, batch=1):
  return {
    "point": {"drafter": "lookup", "k": k},
    "run": run(k=k, batch=batch),
    "prediction": {"speedup": 1.3},
    "drafter": "lookup",
  }


@pytest.fixture
def sweep(tmp_path):
  folder = tmp_path / "sweep"
  folder.mkdir()
  lines = [json.dumps(line(k)) for k in (1, 2, 2)]
  (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
  return folder


def read(path):
  with path.open(newline="") as file:
    return [*csv.DictReader(file)]


def test_rows_of_the_folder_of_a_run(tmp_path):
  (tmp_path / "lines.jsonl").write_text('{"number": 0}\n')
  (tmp_path / "results.json").write_text(json.dumps(document()))
  assert len(csv_rows.read(tmp_path)) == 4
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="no folder of a sweep, nor of another"):
    csv_rows.read(tmp_path / "empty")
  with pytest.raises(ValueError, match="nothing does not exist"):
    csv_rows.read(tmp_path / "nothing")


def test_rows_of_sweeps_and_of_other_results(tmp_path, sweep, capsys):
  (tmp_path / "b.json").write_text(json.dumps(document()))
  path = tmp_path / "all.csv"
  named = f"x, y={tmp_path / 'b.json'}"
  programs.run("report", f"--csv={path}", str(sweep), named)
  assert f"{path}: 6 rows" in capsys.readouterr().out
  rows = read(path)
  assert [row["label"] for row in rows] == 2 * [str(sweep)] + 4 * ["x, y"]
  assert [row["run.k"] for row in rows] == ["1", "2", "1", "2", "1", "2"]
  speedup = "run.speed.speedup.value"
  assert {float(row[speedup]) for row in rows} == {1.4}
  assert [row["prediction.speedup"] for row in rows] == ["1.3"] * 2 + [""] * 4
  assert [row["settings.target"] for row in rows] == [""] * 2 + ["a-model"] * 4
  assert [row["run.group"] for row in rows[2:]] == ["qa", "qa", "all", "all"]


def test_lists_count_from_one_and_nothing_is_empty():
  entry = {"a": [{"b": 1}, {"b": None}], "c": {"d": [True, "x"]}, "e": []}
  assert [*csv_rows.flat(entry)] == [
    ("a.1.b", 1), ("a.2.b", None), ("c.d.1", True), ("c.d.2", "x"),
  ]  # fmt: skip
  text = csv_rows.as_csv([{"x": None, "y": 'a "quoted", one'}, {"z": 2}])
  assert text == 'x,y,z\n,"a ""quoted"", one",\n,,2\n'


@pytest.mark.parametrize(
  "content, sentence",
  [
    ("[1]", "is none of this repository's results"),
    (json.dumps(document() | {"runs": []}), "has no run"),
  ],
)
def test_files_without_runs_are_refused(tmp_path, content, sentence):
  (tmp_path / "x.json").write_text(content)
  path = tmp_path / "all.csv"
  with pytest.raises(SystemExit, match=sentence):
    programs.run("report", f"--csv={path}", str(tmp_path / "x.json"))
  assert not path.exists()
  with pytest.raises(SystemExit, match="folders of sweeps, or files"):
    programs.run("report", f"--csv={path}")
