"""Training on eight virtual devices, in a process that has them."""

import pathlib

import pytest

import virtual

CASES = pathlib.Path(__file__).with_name("training_mesh_cases.py")


@pytest.mark.parametrize(
  "marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_eight_devices_train_as_one(marked):
  virtual.run_cases("-m", marked, CASES)
