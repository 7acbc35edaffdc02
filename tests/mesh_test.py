"""Meshes of eight virtual devices, in a process that has them."""

import pathlib

import pytest

import virtual

CASES = pathlib.Path(__file__).with_name("mesh_cases.py")
WEIGHTS = CASES.with_name("weights_mesh_cases.py")
FAMILIES = CASES.with_name("families_mesh_cases.py")
HEADS = "eagle or mtp or prophet or medusa or hydra or recycle or head or whole"


@pytest.mark.parametrize(
  "marked, names",
  [
    ("not slow", f"not ({HEADS})"),
    pytest.param("not slow", HEADS, marks=pytest.mark.slow),
    pytest.param("slow", "test", marks=pytest.mark.slow),
  ],
)
def test_eight_devices_equal_one(marked, names):
  virtual.run_cases("-m", marked, "-k", names, CASES, WEIGHTS, FAMILIES)
