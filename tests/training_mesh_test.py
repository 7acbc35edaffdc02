"""Training on eight virtual devices, in a process that has them."""

import pathlib
import subprocess
import sys

import pytest

import virtual

CASES = pathlib.Path(__file__).with_name("training_mesh_cases.py")


@pytest.mark.parametrize(
  "marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_eight_devices_train_as_one(marked):
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--durations=5"]
    + ["-m", marked, CASES],
    env=virtual.environment(8),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
    cwd=CASES.parents[1],
  )
  print(done.stdout)
  assert done.returncode == 0, done.stdout[-4000:]
