"""Rates of this machine: measured, cached once, read back unchanged.

Nothing here depends on how fast or how quiet the machine is.
"""

import functools
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from specdec.benchmark import points, timing
from specdec.benchmark.setup import Setup
from specdec.models import presets
from specdec.roofline import chips, hardware
from specdec.roofline.cost import pass_bound

MEASURED = hardware.Hardware(
  name="a machine",
  memory=1 << 34,
  bandwidth=((4 << 20, 9e10), (64 << 20, 2.5e10), (1 << 30, 1 / 3 * 1e11)),
  copy_bandwidth=1.5e10,
  flops={"float32": 1e11, "int8": 2e11},
  date="2026-01-31",
  jax_version="0.0.0",
)


measure_flops = functools.partial(hardware.measure_flops, seconds=0.0)


@pytest.fixture
def calls(monkeypatch):
  """Records measurements in order; each is instantaneous."""
  log = []

  def fake(kind, rate):
    def measure(argument):
      log.append((kind, argument))
      return rate

    monkeypatch.setattr(hardware, f"measure_{kind}", measure)

  monkeypatch.setattr(hardware, "device_memory", lambda: (1 << 34, 1 << 34))
  fake("bandwidth", 3e10)
  fake("copy", 1e10)
  fake("flops", 1e11)
  return log


@pytest.mark.parametrize(
  "size, rate",
  [
    (1, 9e10),  # smaller than any: the smallest
    (4 << 20, 9e10),
    (64 << 20, 1 / 3 * 1e11),  # 1 GiB was read faster, so 64 MiB can be
    (1 << 40, 1 / 3 * 1e11),
  ],
)
def test_a_machine_reads_no_smaller_set_slower(size, rate):
  assert chips.of_hardware(MEASURED).read_bandwidth(size) == rate


@pytest.mark.parametrize(
  "changes",
  [
    {"colour": "red"},
    {"bandwidth": []},
    {"bandwidth": [1, 2]},
    {"bandwidth": [[2, 1.0], [1, 1.0]]},
    {"copy_bandwidth": 0},
    {"copy_bandwidth": "fast"},
    {"flops": {"float32": math.nan}},
  ],
)
def test_damaged_text_is_refused(changes):
  text = MEASURED.to_json()
  assert hardware.Hardware.from_json(text) == MEASURED
  for damaged in (json.dumps(json.loads(text) | changes), text[:-20], "[]"):
    with pytest.raises(ValueError):
      hardware.Hardware.from_json(damaged)


def test_a_machine_is_measured_once(calls, tmp_path):
  folder = tmp_path / "new" / "folder"
  lines = []
  first = hardware.local(folder=folder, progress=lines.append)
  count = len(calls)
  assert {kind for kind, _ in calls} == {"bandwidth", "copy", "flops"}
  assert lines[0] == "reading 4 MiB" and "multiplying int8" in lines
  assert hardware.local(folder=folder, progress=lines.append) == first
  assert len(calls) == count == len(lines)
  (file,) = folder.iterdir()  # no scratch is left
  assert hardware.Hardware.from_json(file.read_text()) == first


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_a_damaged_file_is_measured_anew(calls, tmp_path, content):
  first = hardware.local(folder=tmp_path)
  (file,) = tmp_path.iterdir()
  file.write_bytes(content)
  count = len(calls)
  for _ in range(2):
    assert hardware.local(folder=tmp_path) == first
    assert len(calls) == 2 * count


def test_a_folder_that_cannot_be_written_is_reported(calls, tmp_path):
  (tmp_path / "file").write_text("")
  lines = []
  rates = hardware.local(folder=tmp_path / "file", progress=lines.append)
  assert rates.flops["float32"] == 1e11
  assert lines[-1].startswith("not cached")


def test_another_machine_has_another_fingerprint(monkeypatch):
  marks = {hardware.fingerprint()}
  changes = {
    "cpu_model": lambda: "another CPU",
    "cpu_cores": lambda: 1000,
    "platform.node": lambda: "another host",
    "jax.__version__": "another version",
    "jax.device_count": lambda _: 1000,
  }
  for name, value in changes.items():
    with monkeypatch.context() as patch:
      patch.setattr(f"specdec.roofline.hardware.{name}", value)
      marks.add(hardware.fingerprint())
  assert len(marks) == 1 + len(changes)
  assert hardware.fingerprint() in marks


def test_unsupported_products_have_no_rate(calls, monkeypatch, tmp_path):
  def int8_alone(matrix):
    if matrix.dtype != "int8":
      raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")
    return matrix

  monkeypatch.setattr(hardware, "measure_flops", measure_flops)
  monkeypatch.setattr(hardware, "_square", int8_alone)
  assert hardware.local(folder=tmp_path).flops.keys() == {"int8"}


@pytest.mark.parametrize(
  "free, sizes",
  [
    (None, [4, 16, 64, 1024]),
    (4 << 30, [4, 16, 64, 1024]),
    ((4 << 30) - 1, [4, 16, 64]),
    (1 << 20, [4]),  # one size there must be
  ],
)
def test_at_most_a_quarter_of_free_memory(
  calls, monkeypatch, tmp_path, free, sizes
):
  monkeypatch.setattr(hardware, "device_memory", lambda: (None, free))
  rates = hardware.local(folder=tmp_path)
  assert [size >> 20 for size, _ in rates.bandwidth] == sizes
  assert ("copy", sizes[-1] << 20) in calls


GROUPS = {  # line of /proc/self/cgroup, folder, names of the files
  "v2": (
    "0::/pod/job", "sys/fs/cgroup", "memory.max", "memory.current",
    "inactive_file",
  ),
  "v1": (
    "4:cpu,memory:/pod/job", "sys/fs/cgroup/memory", "memory.limit_in_bytes",
    "memory.usage_in_bytes", "total_inactive_file",
  ),
}  # fmt: skip


@pytest.fixture(params=GROUPS)
def machine(tmp_path, request):
  """Returns the root of a 64 GiB machine, 48 free, and a writer of cgroups."""
  line, base, limited, usage, cache = GROUPS[request.param]
  proc = tmp_path / "proc"
  (proc / "self").mkdir(parents=True)
  kib = 1 << 20
  (proc / "meminfo").write_text(
    f"MemTotal: {64 * kib} kB\nMemFree: 1 kB\nMemAvailable: {48 * kib} kB\n"
  )
  (proc / "self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")

  def limit(group, allowed, used, cached=0):
    folder = tmp_path / base / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limited).write_text(f"{allowed}\n")
    (folder / usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache} {cached}\n")

  return tmp_path, limit


def test_a_cgroup_limits_memory(machine):
  root, limit = machine
  gib = 1 << 30
  assert hardware.device_memory(root) == (64 * gib, 48 * gib)
  limit("pod/job", "max", 8 * gib)
  limit("pod", (1 << 63) - 4096, 8 * gib)  # how v1 says that there is none
  limit("other", gib, 0)  # not an ancestor
  assert hardware.device_memory(root) == (64 * gib, 48 * gib)
  limit("pod/job", 32 * gib, 8 * gib)
  assert hardware.device_memory(root) == (32 * gib, 24 * gib)
  # An ancestor may leave less; cached files make room.
  limit("pod", 40 * gib, 39 * gib, cached=2 * gib)
  assert hardware.device_memory(root) == (32 * gib, 3 * gib)
  # So does the container's own group, which it sees as the root.
  limit(".", 5 * gib, 6 * gib)
  assert hardware.device_memory(root) == (5 * gib, 0)


def test_measured_rates_are_positive_and_finite():
  rates = [
    hardware.measure_bandwidth(1 << 16, repeats=1),
    hardware.measure_copy(1 << 16, repeats=1),
    *(
      hardware.measure_flops(dtype, seconds=1e-4, repeats=1)
      for dtype in ("float32", "bfloat16", "int8")
    ),
  ]
  assert all(math.isfinite(rate) and rate > 0 for rate in rates)


def test_every_pass_reads_the_whole_matrix():
  # One value times 1e-30 doubles the vector: a pass left out would show.
  matrix = jnp.zeros((2, 2048)).at[1, 7].set(1e30)
  vector = jnp.ones((2048,))
  assert hardware._reads(matrix, vector, 1)[7] == pytest.approx(2)
  assert hardware._reads(matrix, vector, 5)[7] == pytest.approx(32)


def test_a_doubted_time_is_held_against_all_devices_measured_again(monkeypatch):
  config = presets.get("smollm2-135m")
  size, flops = pass_bound(config, 1, 1, 0)
  entry = {"batch": 1, "tokens": 1, "context": 0, "bytes": size, "flops": flops}
  entry |= {"seconds": {"least": size / 6e9}, "warnings": []}
  entry |= {"bandwidth": 1e9, "bandwidth_share": {"value": 0.8, "error": None}}
  document = {"bandwidth": 1e9, "passes": [entry], "runs": []}
  mesh = SimpleNamespace(mesh=SimpleNamespace(size=2))
  target = SimpleNamespace(
    checkpoint=SimpleNamespace(config=config, params={}),
    places=SimpleNamespace(target=mesh),
  )
  monkeypatch.setattr(timing, "bandwidth_of", lambda _: 3e9)
  assert points.check_times(document, Setup(), target, MEASURED) == []
  assert document["bandwidth"] == 6e9 and not entry["warnings"]
  assert entry["bandwidth_share"] == {"value": 0.4, "error": None}
