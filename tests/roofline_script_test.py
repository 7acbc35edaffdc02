"""scripts/roofline.py as a subprocess; its flags clash with decoding's."""

import csv
import dataclasses
import subprocess
import sys

import pytest

import programs
from specdec.roofline import chips, papers, shapes
from specdec.roofline.calibration import Calibration, Errors, Fit, RoundFit
from specdec.roofline.cost import Deployment, Efficiency
from specdec.roofline.pairs import TargetDraftPair
from specdec.roofline.round_cost import Overhead


def run(*arguments):
  return subprocess.run(
    [sys.executable, programs.SCRIPTS / "roofline.py", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def test_the_papers_tables():
  done = run("--papers")
  assert done.returncode == 0, done.stderr
  for row in papers.LEVIATHAN_1:
    cells = f"| {row.alpha} | {row.k} | {row.operations:.2f} |"
    assert cells in done.stdout
    assert f"| {row.speed:.2f} | {row.speed:.2f} |" in done.stdout


def test_tables_pictures_and_cells(tmp_path):
  done = run(
    "--chip=h100", "--chips=v5e,a100", "--target=llama3-8b", "--ways=1",
    "--draft=llama3-1b", "--drafts=llama3-1b,0.02", "--batches=1,8,64",
    "--contexts=512,8192", "--most=4", f"--output={tmp_path}",
    "--rank_acceptance=0.7,0.1", "--numbers=bfloat16=5e14,rows=1",
    "--weights=int8", "--chips=v7",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  for words in (
    "a round of k = 0",
    "best k",
    "vLLM:",
    "TensorRT-LLM:",
    "best tree",
    "best draft size",
  ):
    assert words in done.stdout
  pictures = {path.stem for path in tmp_path.glob("*.png")}
  assert pictures == {
    "k_batch", "k_context", "k_acceptance", "k_draft", "chips", "roofline",
  }  # fmt: skip
  with (tmp_path / "cells.csv").open() as file:
    cells = list(csv.DictReader(file))
  assert len(cells) == 3 * 2 * 5
  assert all(c["speedup"] == "1" for c in cells if c["k"] == "0")


def test_a_calibrated_machine_and_its_early_exit(tmp_path):
  fit = Fit(Efficiency(one=0.5), *[Errors(0.0, 0.0, 0)] * 3)
  name = "smollm2-135m"
  overhead = RoundFit(
    Overhead(((1, 2e-3, 0.0),)),
    Overhead(((1, 1e-3, 0.0),)),
    Errors(0.0, 0.0, 0),
  )
  saved = Calibration(
    programs.HARDWARE,
    {name: fit, f"{name}, first 10 layers": fit},
    {f"{name}, exit after 10, coupled, greedy": overhead},
  )
  path = tmp_path / "calibration.json"
  path.write_text(saved.to_json())
  done = run(
    f"--calibration={path}", f"--target={name}", "--exit_layer=10",
    "--context=64", "--most=1", "--alpha=1",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert f"beside the passes: as of {name}, exit after 10" in done.stderr
  chip = chips.of_hardware(programs.HARDWARE)
  types = {"weights": "float32", "kv": "float32"}
  target = saved.place(name, Deployment(shapes.get(name), chip, **types))
  pair = TargetDraftPair(
    target,
    dataclasses.replace(target, stop=10),
    10,
    overhead.ours,
    overhead.baseline,
  )
  for k in (0, 1):
    seconds = pair.round(1, k, 64).seconds
    assert f"{k + 1}.00 tokens in {1e3 * seconds:.3f} ms" in done.stdout


def test_positions_that_cross_attention_reads():
  with_source, without = (
    run("--target=t5-xxl", "--draft=none", "--ways=1", "--chip=v6e", source)
    for source in ("--source=4096", "--source=0")
  )
  assert with_source.returncode == 0, with_source.stderr

  def read(done):
    lines = [x for x in done.stdout.splitlines() if "KV read" in x]
    return float(lines[0].split()[2])

  # 24 layers, 64 heads of 64, keys and values of two bytes.
  extra = 4096 * 24 * 64 * 64 * 2 * 2 / 1e6
  assert read(with_source) - read(without) == pytest.approx(extra, rel=0.01)


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--chip=v9"], "no chip 'v9'; known: v3, v4"),
    (["--target=gpt-5"], "no model 'gpt-5'"),
    (["--target=0.5"], "--target=0.5 is a share of itself; give"),
    (["--contexts=inf"], "--contexts: inf; it must be whole"),
    (["--most=1000000"], "--most=1000000: 1000000 is not integer <= 64"),
    (["--ways=3"], "3 chips do not divide 64 heads"),
    (["--ways=1"], "more than the 85.50 that can be used; target weights"),
    (["--alpha=1.2"], "acceptance 1.2 is outside [0, 1]"),
    (["--alpha=nan"], "acceptance nan is outside [0, 1]"),
    (["--prefix_acceptance=0.5,0.6"], "ascends"),
    (["--prefix_acceptance=nan"], "acceptance nan is outside [0, 1]"),
    (["--correlation=-1"], "correlation = -1; it must be in [0, 1]"),
    (["--correlation=nan"], "correlation = nan; it must be in [0, 1]"),
    (["--rank_acceptance=nan"], "acceptance must be in [0, 1]"),
    (["--rank_acceptance=-0.5"], "acceptance must be in [0, 1]"),
    (["--batches=inf"], "--batches: inf; it must be whole and in 1"),
    (["--batches=nan"], "--batches: nan; it must be whole and in 1"),
    (["--law=nan:0.5,1e9:0.6"], "nan parameters; it must be finite"),
    (["--numbers=width=3"], "no number 'width'"),
    (["--numbers=bandwidth=fast"], "--numbers: could not convert"),
    (
      ["--draft=smollm2-135m", "--draft_ways=1"],
      "vocabularies of 49152 and 128256",
    ),
    (["--law=1e9:0.5"], "two sizes"),
    (["--batches=a"], "--batches:"),
    (["--batches=0"], "--batches: 0; it must be whole and in 1..2**31"),
    (["--context=0"], "--context=0"),
    (["--numbers=axes=1.5"], "axes = 1.5; it must be whole"),
    (["--most=0"], "--most=0"),
  ],
)
def test_bad_input_is_one_sentence(tmp_path, arguments, sentence):
  done = run(*arguments, f"--output={tmp_path}")
  assert done.returncode == 1
  assert sentence in done.stderr
  assert "Traceback" not in done.stderr
