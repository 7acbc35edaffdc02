"""Planned memory against the peak resident set of a process (Linux)."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from specdec.compiled import memory_plan
from specdec.models import cpu_kernels, presets
from specdec.types import UNKNOWN_COST, DrafterCost

ROOT = pathlib.Path(__file__).parents[1]
STATUS = pathlib.Path("/proc/self/status")
pytestmark = pytest.mark.skipif(
  not STATUS.exists() or "VmHWM" not in STATUS.read_text(),
  reason="this system does not tell the peak of a process",
)
# Of the process itself: ru_maxrss would begin with that of its parent.
PEAK = f"""
def peak():
  lines = open("{STATUS}").read().splitlines()
  return 1024 * int(next(x for x in lines if x[:5] == "VmHWM").split()[1])
"""
GENERATE = f"""{PEAK}
import atexit, runpy, sys
atexit.register(lambda: print(f"peak {{peak()}}", file=sys.stderr))
sys.argv[0] = "{ROOT / "scripts" / "generate.py"}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INITIALISE = f"""{PEAK}
import jax
from specdec.models import layouts, transformer
from specdec.models.config import TransformerConfig

config = TransformerConfig(
  vocab_size=1024, num_layers=24, width=512, mlp_width=2048,
  num_heads=8, num_kv_heads=8, head_dim=64,
)
jax.random.normal(jax.random.key(0), (8,)).block_until_ready()
before = peak()
params = layouts.pack(transformer.init_params(config, jax.random.key(0)))
jax.block_until_ready(params)
print(sum(x.nbytes for x in jax.tree.leaves(params)), peak() - before)
"""
RANDOM = "--random_weights", "--dtype=bfloat16"
# Name -> (prompts, tokens of each, flags): every kind of drafter, both dtypes,
# few and many rows, weights that are read and drawn.
SETTINGS = {
  "shipped pair": (1, 60, ("--drafter=model(stdlib-1m)",)),
  "shipped pair, 64 rows": (64, 100, ("--drafter=model(stdlib-1m)",)),
  "learned drafter, 16 rows": (16, 100, ("--drafter=head(eagle)",)),
  "early exit, trees, long prompts": (
    8, 2000, ("--drafter=early_exit(2)",
    "--shape=optimal(12, [0.7, 0.2, 0.1])", "--k=4"),
  ),
  "135 M, drawn": (
    4, 500, ("--random_weights", "--target=preset:smollm2-135m"),
  ),
  "270 M, large vocabulary": (4, 500, (*RANDOM, "--target=preset:gemma3-270m")),
  "T5": (4, 100, ("--target=stdlib-t5-5m",)),
  "T5 base, drawn": (
    4, 400, ("--random_weights", "--target=preset:t5-base"),
  ),
  "1 B": (1, 60, (*RANDOM, "--target=preset:llama3-1b")),
}  # fmt: skip


def start(*arguments):
  """Runs Python on one CPU device, compiling as users do."""
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  paths = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
  return subprocess.run(
    [sys.executable, *arguments],
    env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
    check=True,
    capture_output=True,
    text=True,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name == "shipped pair" else pytest.mark.slow)
    for name in SETTINGS
  ],
)
def test_the_plan_is_near_the_peak(name, tmp_path):
  count, length, flags = SETTINGS[name]
  file = tmp_path / "prompts.jsonl"
  ids = [[1 + (7 * i + j) % 4000 for j in range(length)] for i in range(count)]
  file.write_text("".join(json.dumps({"token_ids": x}) + "\n" for x in ids))
  result = start(
    "-c", GENERATE, *flags, f"--prompt_file={file}",
    f"--batch={count}", "--max_new_tokens=32", "--compilation_cache=",
  )  # fmt: skip
  # The first plan draws weights, the last one counts the prompts.
  plans = re.findall(r"each device needs about ([\d.]+) GiB", result.stderr)
  peak = int(re.findall(r"peak (\d+)", result.stderr)[-1])
  assert max(map(float, plans)) * 2**30 == pytest.approx(peak, rel=0.25)


def test_random_weights_are_drawn_and_packed_one_by_one():
  weights, used = map(int, start("-c", INITIALISE).stdout.split())
  assert weights > 400e6
  assert used < 2.5 * weights, used / weights  # 3.5 all at once


def plan(name, dtype, **options):
  config = presets.get(name, dtype)
  shape = {"batch": 1, "max_length": 96, "num_nodes": 6, "prompt_size": 64}
  return memory_plan.plan(config, None, **(shape | options))


@pytest.fixture
def no_kernels(monkeypatch):
  monkeypatch.setattr(cpu_kernels, "available", lambda: False)


def test_kernels_multiply_weights_as_they_are_held(monkeypatch):
  monkeypatch.setattr(cpu_kernels, "available", lambda: True)
  for dtype, batch in (("float32", 1), ("bfloat16", 1), ("bfloat16", 22)):
    parts = plan("llama3-1b", dtype, cpu=True, batch=batch).parts
    assert parts["copies of weights"] == 0
  experts = plan("mixtral-8x7b", "bfloat16", cpu=True).parts
  assert 0 < experts["copies of weights"] < experts["target"] / 10


def test_without_kernels_a_cpu_multiplies_bfloat16_in_float32(no_kernels):
  wide, narrow = (
    plan("llama3-1b", dtype, cpu=True) for dtype in ("float32", "bfloat16")
  )
  copies = narrow.parts["copies of weights"]
  assert copies == pytest.approx(wide.parts["target"])
  assert narrow.needed > wide.needed
  assert "copies of weights" not in plan("llama3-1b", "bfloat16").parts


def test_without_kernels_many_tokens_take_unpacked_matrices(no_kernels):
  few, many, rounds = (
    plan("smollm2-135m", "float32", cpu=True, batch=batch).parts
    for batch in (1, 4, 22)  # a round of so many nodes computes logits as well
  )
  assert few["copies of weights"] == 0
  assert 0 < many["copies of weights"] < many["target"]
  assert rounds["copies of weights"] == rounds["target"]


def test_drawing_weights_counts_where_it_is_the_peak():
  read, drawn = (
    plan("gemma3-270m", "float32", cpu=True, random_weights=drawn)
    for drawn in (False, True)
  )
  embedding, bits = 262_144 * 640, drawn.parts["random bits of weights"]
  assert bits == pytest.approx(12 * embedding, rel=0.3)
  assert read.needed < drawn.needed


def test_a_prefill_s_last_chunk_may_reach_past_the_longest_row():
  short, exact = (
    plan("smollm2-135m", "float32", prompt_size=size).parts["KV caches"]
    for size in (0, 64)
  )
  assert exact / short == pytest.approx(128 / 102)


def test_a_plan_is_a_sentence():
  parts = {"runtime": 2**28, "target": 2**29, "programs": 2**20}
  text = "Python and JAX 0.25, target 0.50, and a tenth to spare"
  assert str(memory_plan.Plan(parts)) == f"0.83 GiB of memory ({text})"


def test_a_drafter_s_cost_is_in_the_plan():
  cost = DrafterCost(
    weight_bytes=5e6, row_bytes=7, position_bytes=64, hidden_bytes=36
  )
  with_drafter = plan("smollm2-135m", "float32", drafter=cost, batch=3)
  assert with_drafter.parts["drafter"] == 5e6
  assert with_drafter.parts["drafter's state"] == 3 * (7 + 96 * 100)
  assert "drafter" not in with_drafter.excluding_weights.parts
  alone = plan("smollm2-135m", "float32", batch=3)
  assert "drafter" not in str(alone)
  unknown = plan("smollm2-135m", "float32", drafter=UNKNOWN_COST, batch=3)
  assert unknown.parts == alone.parts
  assert str(unknown).endswith("the drafter's memory is unknown")
