"""scripts/train_drafter.py, in a process that has no other program's flags."""

import os
import pathlib
import subprocess
import sys

import pytest

CASES = pathlib.Path(__file__).with_name("train_drafter_cases.py")


@pytest.mark.parametrize(
  "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_train_drafter(which):
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", which, CASES],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
    cwd=CASES.parents[1],
  )
  assert done.returncode == 0, done.stdout[-6000:]
