"""The memory of a generation against the peak of its process.

Peaks are of the resident set, in bytes, where Linux tells them.
"""

import os
import pathlib
import subprocess
import sys

import pytest

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
INITIALISE = f"""{PEAK}
import jax
from specdec.models import packing, transformer
from specdec.models.config import TransformerConfig

config = TransformerConfig(
  vocab_size=1024, num_layers=24, width=512, mlp_width=2048,
  num_heads=8, num_kv_heads=8, head_dim=64,
)
jax.random.normal(jax.random.key(0), (8,)).block_until_ready()
before = peak()
params = packing.pack(transformer.init_params(config, jax.random.key(0)))
jax.block_until_ready(params)
print(sum(x.nbytes for x in jax.tree.leaves(params)), peak() - before)
"""


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


def test_random_weights_are_drawn_and_packed_one_by_one():
  weights, used = map(int, start("-c", INITIALISE).stdout.split())
  assert weights > 400e6
  assert used < 2.5 * weights, used / weights  # 3.5 all at once
