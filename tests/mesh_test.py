"""Meshes of eight virtual devices, in a process that has them."""

import pathlib
import subprocess
import sys

import pytest

import virtual

CASES = pathlib.Path(__file__).with_name("mesh_cases.py")


def run(*arguments):
  """pytest over mesh_cases.py, with eight devices."""
  return subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *arguments, CASES],
    env=virtual.environment(8),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
    cwd=CASES.parents[1],
  )


# Two processes, one after the other or side by side.
@pytest.mark.parametrize("half", ["8x1 or 4x2", "not (8x1 or 4x2)"])
def test_eight_devices_equal_one(half):
  done = run("-m", "not slow", "-k", half)
  assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_eight_devices_equal_one_whatever_is_combined():
  done = run("-m", "slow")
  assert done.returncode == 0, done.stdout[-4000:]
