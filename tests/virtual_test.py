"""XLA flags are asked for before they are set."""

import pytest

import virtual

KNOWN = "--xla_force_host_platform_device_count=2"


def test_an_unknown_xla_flag_is_left_out():
  flags = [KNOWN, "--xla_no_such_flag=1", "--xla_nor_this=true"]
  assert virtual.supported_flags(flags) == [KNOWN]


def test_an_error_that_is_not_about_flags_is_raised(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", "")
  monkeypatch.setattr("sys.executable", "/bin/false")
  with pytest.raises(RuntimeError, match="does not start"):
    virtual.supported_flags([KNOWN])
