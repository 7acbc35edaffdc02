"""The program roofline, in this process."""

import csv
import re

import pytest

import programs
from specdec.benchmark.scenario import Scenario
from specdec.report import papers
from specdec.roofline import chips, planning, shapes
from specdec.roofline.calibration import Calibration, Errors, Fit, RoundFit
from specdec.roofline.cost import Deployment, Efficiency
from specdec.roofline.round_cost import Overhead, TargetDraftPair
from specdec.types import DrafterCost


def test_the_papers_tables(capsys):
  programs.run("roofline", "--papers")
  text = capsys.readouterr().out
  for row in papers.LEVIATHAN_1:
    assert f"| {row.alpha} | {row.k} | {row.operations:.2f} |" in text
  assert "Measured over printed prediction: 0.68 to 1.29." in text


def test_tables_pictures_and_cells(tmp_path, capsys):
  config = tmp_path / "config.py"  # of flags that are not given
  config.write_text(
    "from ml_collections import ConfigDict\n"
    "get_config = lambda: ConfigDict(dict(chip='h100', ways=2, most=4))\n"
  )
  programs.run(
    "roofline", f"--config={config}", "--chips=v5e,a100",
    "--target=llama3-8b", "--ways=1", "--drafter=model(llama3-1b)",
    "--drafts=llama3-1b,0.02", "--batches=1,8,64", "--contexts=512,8192",
    f"--output={tmp_path / 'out'}", "--rank_acceptance=0.7,0.1",
    "--numbers=bfloat16=5e14,rows=1", "--weights=int8", "--chips=v7",
  )  # fmt: skip
  text = capsys.readouterr().out
  for words in (
    "1 x h100", "a round of k = 0", "best k", "vLLM:", "TensorRT-LLM:",
    "best tree", "best draft size",
  ):  # fmt: skip
    assert words in text
  pictures = {path.stem for path in tmp_path.glob("out/*.png")}
  assert pictures == {
    "k_batch", "k_context", "k_acceptance", "k_draft", "chips", "roofline",
  }  # fmt: skip
  with (tmp_path / "out/cells.csv").open() as file:
    cells = list(csv.DictReader(file))
  assert len(cells) == 3 * 2 * 5
  assert {cell["draft"] for cell in cells} == {"model(llama3-1b)"}
  assert all(c["speedup"] == "1" for c in cells if c["k"] == "0")


def test_all_chips_side_by_side(capsys):
  deployment = dict(weights="int8", compute="fp8", ways=2)
  flags = [f"--{name}={value}" for name, value in deployment.items()]
  programs.run("roofline", "--chips=all", "--target=llama3-8b", *flags)
  text = capsys.readouterr().out
  assert "~: a FLOP/s that is inferred, not published" in text
  rows = {x.split()[0]: x.split()[1:] for x in text.splitlines() if x.split()}
  for name, chip in chips.CHIPS.items():
    assert (name in rows) == ("fp8" in chip.flops)
    if name not in rows:
      continue
    scenario = Scenario.of("llama3-8b", "model(llama3-1b)", chip, **deployment)
    best = planning.best_k(scenario.pair, 1, 2048, 0.75, 8)
    tokens = best.speedup / scenario.pair.round(1, 0, 2048).seconds
    assert rows[name][1].startswith("~") == (name in ("v8t", "v8i"))
    assert rows[name][3:6] == [
      f"{tokens:,.0f}",
      f"{best.k}",
      f"{best.speedup:.2f}",
    ]


@pytest.mark.parametrize(
  "setting",
  ["early_exit(10), coupled, greedy", "exit after 10, coupled, greedy"],
)
def test_a_calibrated_machine_and_its_early_exit(tmp_path, capsys, setting):
  name, none = "smollm2-135m", Errors(0.0, 0.0, 0)
  fit = Fit(Efficiency(one=0.5), none, none, none)
  ours, theirs = (Overhead(((1, x, 0.0),)) for x in (2e-3, 1e-3))
  overhead = RoundFit(ours, theirs, none)
  calibration = Calibration(
    programs.HARDWARE,
    {name: fit, f"{name}, first 10 layers": fit},
    {f"{name}, {setting}": overhead},
  )
  path = tmp_path / "calibration.json"
  path.write_text(calibration.to_json())
  programs.run(
    "roofline", f"--calibration={path}", f"--target={name}",
    "--drafter=early_exit(10)", "--context=64", "--most=1", "--alpha=1",
  )  # fmt: skip
  printed = capsys.readouterr()
  assert f"by the calibration: {name}, {setting}" in printed.err
  chip = chips.of_hardware(programs.HARDWARE)
  types = {"weights": "float32", "kv": "float32"}
  target = calibration.place(name, Deployment(shapes.get(name), chip, **types))
  cost = DrafterCost(exit_layer=10)
  pair = TargetDraftPair(target, cost, None, ours, theirs)
  for k in (0, 1):
    seconds = pair.round(1, k, 64).seconds
    assert f"{k + 1}.00 tokens in {1e3 * seconds:.3f} ms" in printed.out
  with pytest.raises(SystemExit, match="--ways is the calibrated machine's"):
    programs.run("roofline", f"--calibration={path}", "--ways=1")


@pytest.mark.parametrize("damaged", [b"", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_calibration_is_named(damaged, tmp_path):
  path = tmp_path / "calibration.json"
  path.write_bytes(damaged)
  with pytest.raises(SystemExit, match=f"--calibration={path}: .+"):
    programs.run("roofline", f"--calibration={path}", "--target=smollm2-135m")


def test_positions_that_cross_attention_reads(capsys):
  programs.run(
    "roofline", "--target=t5-xxl", "--drafter=lookup", "--ways=1",
    "--chip=v6e", "--source=4096", "--context=1",
  )  # fmt: skip
  read = float(re.search(r"KV read +(\S+)", capsys.readouterr().out)[1])
  # 24 layers, 64 heads of 64, keys and values of two bytes.
  assert read == pytest.approx(4097 * 24 * 64 * 64 * 2 * 2 / 1e6, rel=0.01)
