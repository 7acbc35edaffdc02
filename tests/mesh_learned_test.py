"""Learned drafters on eight virtual devices, in a process that has them."""

import pytest

import mesh_test


@pytest.mark.parametrize(
  "which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_eight_devices_equal_one(which, monkeypatch):
  cases = mesh_test.CASES.with_name("mesh_learned_cases.py")
  monkeypatch.setattr(mesh_test, "CASES", cases)
  done = mesh_test.run("-m", which)
  assert done.returncode == 0, done.stdout[-4000:]
