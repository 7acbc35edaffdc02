"""What every program does around its own work."""

import os

import _main
import pytest

NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


@pytest.mark.parametrize(
  "skip, devices, own, quiet",
  [
    ("1", [], None, True),  # JAX found no chip
    (None, [], None, False),  # it found some
    ("true", [], None, False),  # somebody else set it
    ("1", ["/dev/accel0"], None, False),
    ("1", ["/dev/vfio/0"], None, False),
    ("1", [], "v6e-8", True),  # what was given stays
  ],
)
def test_libtpu_is_quiet_only_where_there_is_no_tpu(
  monkeypatch, skip, devices, own, quiet
):
  monkeypatch.setattr(
    _main.glob,
    "glob",
    lambda pattern: [x for x in devices if x.startswith(pattern[:8])],
  )
  values = {"TPU_SKIP_MDS_QUERY": skip, NAMES[0]: own, NAMES[1]: None}
  environment = {name: x for name, x in values.items() if x is not None}
  monkeypatch.setattr(os, "environ", environment)
  _main._quiet_libtpu()
  assert environment.get(NAMES[0]) == (
    own or ("v5litepod-1" if quiet else None)
  )
  assert environment.get(NAMES[1]) == ("localhost" if quiet else None)
