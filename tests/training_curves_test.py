"""Curves of training: the right points, and what the last doubling brought."""

import json

import pytest

import programs
from specdec.training import curves


def write_run(folder, steps=(10, 20, 40), gain=0.5):
  """Tokens a pass rise by `gain` with every doubling."""
  folder.mkdir()
  settings = {
    "options": {"batch": 2, "sequence": 8},
    "decoding": {"k": 3},
  }
  (folder / "run.json").write_text(json.dumps(settings))
  lines = []
  for i, step in enumerate(steps):
    kept = {"acceptance_1": 0.6 + 0.1 * i, "acceptance_2": 0.4 + 0.1 * i}
    lines += [
      {"step": step - 1, "kind": "train", "loss": 1.0},
      {"step": step, "kind": "held_out", "loss": 1.0, **kept},
      {
        "step": step,
        "kind": "decoding",
        "tokens_per_pass": 1 + gain * i,
        "prefix_acceptance": [0.5 + 0.1 * i, 0.2],
      },
    ]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text + '{"step": 50, "ki')
  return folder


def test_points(tmp_path):
  curve = curves.read(write_run(tmp_path / "one"))
  assert curve.tokens == (160, 320, 640)
  assert curve.tokens_per_pass == (1.0, 1.5, 2.0)
  assert curve.acceptance == pytest.approx((0.5, 0.6, 0.7))
  assert curve.first == pytest.approx((0.5, 0.6, 0.7))
  assert curve.last_doubling == pytest.approx(0.5)


def test_doubling_between_evaluations(tmp_path):
  """Half of the tokens lie in the middle, on a logarithm's scale."""
  steps = (10, 40, 40 * 2**0.5)
  curve = curves.read(write_run(tmp_path / "one", [int(x) for x in steps]))
  # 28 lies 0.743 of the way from 10 to 40, on the logarithm.
  assert curve.last_doubling == pytest.approx(2.0 - 1.3714, abs=1e-3)


def test_no_half(tmp_path):
  curve = curves.read(write_run(tmp_path / "one", (30, 35, 40)))
  assert curve.last_doubling is None


def test_prints_and_plots(tmp_path, capsys):
  for name in ("one", "two"):
    write_run(tmp_path / name)
  picture = tmp_path / "curves.png"
  programs.run("training_curves", f"{tmp_path}/*", f"--picture={picture}")
  table = capsys.readouterr().out
  assert "two" in table and "+0.50" in table
  assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    ([], "give folders of train_drafter.py"),
    (["--title=a", "x"], "--title is for --picture"),
    (["nowhere-*"], r"nowhere-\* names no folder"),
  ],
)
def test_refusals(arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    programs.run("training_curves", *arguments)


@pytest.mark.parametrize(
  "missing", ["run.json", "metrics.jsonl", "evaluations"]
)
def test_refused(tmp_path, missing):
  folder = write_run(tmp_path / "one")
  if missing == "evaluations":
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no evaluation yet"):
      curves.read(folder)
  else:
    (folder / missing).unlink()
    with pytest.raises(ValueError, match="not a run of a drafter"):
      curves.read(folder)
