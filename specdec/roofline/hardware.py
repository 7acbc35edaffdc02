"""Measures a machine's peak rates: bytes/s of memory, FLOP/s of products.

Every rate is the best of several timings. A pass that appears faster than these
rates allow was timed wrongly, or ran while the machine was less loaded.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import re
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec.utils import files, huge_pages

_SIZES = (4 << 20, 16 << 20, 64 << 20, 1 << 30)  # bytes, from cache to memory
_DTYPES = ("float32", "bfloat16", "int8")
_ROW = 2048  # float32 values per row of the matrix
_TIMING = 0.05  # s; dispatch takes tens of microseconds
_LARGEST = 16384  # side of a product large enough to saturate any device


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Measured rates of one device.

  Raises:
    ValueError: a rate is not positive and finite, or the working sets of
      `bandwidth` do not ascend.
  """

  name: str
  memory: int | None  # total bytes; None: the platform does not report it
  bandwidth: tuple[tuple[int, float], ...]  # (working set in bytes, B/s read)
  copy_bandwidth: float  # B/s of a large copy, reads plus writes
  flops: dict[str, float]  # by dtype: FLOP/s (int8: OP/s) of a large product
  date: str  # ISO
  jax_version: str

  def __post_init__(self):
    sizes = [size for size, _ in self.bandwidth]
    if not sizes or sizes != sorted(set(sizes)):
      raise ValueError(f"sizes of working sets must ascend, got {sizes}")
    rates = [rate for _, rate in self.bandwidth]
    for rate in (*rates, self.copy_bandwidth, *self.flops.values()):
      if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"a rate must be positive and finite, got {rate}")

  def to_json(self) -> str:
    """Serialises the rates; `from_json` is the inverse."""
    return json.dumps(dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> "Hardware":
    """Parses the text of `to_json`.

    Raises:
      ValueError: the text was not written by `to_json`.
    """
    try:
      fields = json.loads(text)
      fields["bandwidth"] = tuple(
        (int(size), float(rate)) for size, rate in fields["bandwidth"]
      )
      return cls(**fields)
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(f"not the text of a Hardware: {error}") from error


def _best(call: Callable[[], Any], repeats: int) -> float:
  """Returns the least seconds of `call`, after one warm-up call."""
  timer = timeit.Timer(lambda: jax.block_until_ready(call()))
  timer.timeit(1)
  return min(timer.repeat(repeats, number=1))


def _pass_timer(run: Callable[[int], Any]) -> Callable[[], float]:
  """Returns what times one pass, in seconds; run(n) does n of them.

  n is so large that a call takes _TIMING seconds.
  """
  passes = 1
  while (seconds := _best(functools.partial(run, passes), 1)) < _TIMING:
    passes = math.ceil(1.5 * passes * _TIMING / seconds)
  return lambda: _best(functools.partial(run, passes), 1) / passes


@functools.partial(jax.jit, static_argnums=2)
def _reads(matrix: jax.Array, vector: jax.Array, passes: int) -> jax.Array:
  """Reads a matrix [rows, _ROW] `passes` times; the result [_ROW] is unused.

  Each pass depends on the vector of the previous one, so XLA cannot hoist it,
  and on a maximum over all rows, so XLA cannot drop any. `passes` is static: a
  loop with a dynamic bound on a GPU synchronises with the host every iteration.
  """

  def one(_, vector):
    return vector + 1e-30 * jnp.max(matrix @ vector)

  return lax.fori_loop(0, passes, one, vector)


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(source: jax.Array, target: jax.Array) -> jax.Array:
  """Writes -source [n] into `target`'s buffer; XLA might elide a plain copy."""
  return -source


@jax.jit
def _square(matrix: jax.Array) -> jax.Array:
  """Returns matrix @ matrix, [n, n]; int8 accumulates in int32."""
  wide = jnp.int32 if matrix.dtype == jnp.int8 else None
  return lax.dot(matrix, matrix, preferred_element_type=wide)


def measure_bandwidth(size: int, repeats: int = 5) -> float:
  """Measures B/s read on the default device: the best of so many timings.

  Args:
    size: as of `bandwidth_timer`.
  """
  read = bandwidth_timer(size)
  return max(read() for _ in range(repeats))


def bandwidth_timer(size: int) -> Callable[[], float]:
  """Returns what measures B/s read by matrix-vector products, at every call.

  One program reads the matrix many times, so that a small one stays in cache
  and dispatch does not count.

  Args:
    size: bytes of the float32 matrix, rounded down to rows of 8 KiB, at least
      one. It is held as long as what is returned.
  """
  matrix = jnp.ones((max(1, size // (4 * _ROW)), _ROW), jnp.float32)
  huge_pages.collapse(jax.block_until_ready(matrix))
  run = functools.partial(_reads, matrix, jnp.ones((_ROW,), jnp.float32))
  seconds = _pass_timer(run)
  return lambda: matrix.nbytes / seconds()


def measure_copy(size: int, repeats: int = 5) -> float:
  """Measures B/s of a float32 copy, reads plus writes.

  Source and target, `size` bytes together, are mapped beforehand: a fresh
  target would page-fault every few KiB.
  """
  source = jnp.ones((max(1, size // 8),), jnp.float32)
  target = jnp.zeros_like(source)

  def run(passes):
    nonlocal target
    for _ in range(passes):
      target = _copy(source, target)
    return target

  seconds = _pass_timer(run)
  return 2 * source.nbytes / min(seconds() for _ in range(repeats))


def measure_flops(
  dtype: str, seconds: float = 0.2, repeats: int = 3
) -> float | None:
  """Measures FLOP/s (int8: OP/s) of a square matrix product; None: unsupported.

  Uses JAX's default precision, which on many accelerators is below float32.

  Args:
    dtype: of both factors.
    seconds: the matrix grows until one product takes this long.
  """
  side, rate = 256, None
  while True:
    try:
      matrix = jnp.ones((side, side), dtype)
      least = _best(functools.partial(_square, matrix), repeats)
    except jax.errors.JaxRuntimeError:
      return rate  # unsupported, or out of memory for a larger one
    rate = 2 * side**3 / least
    if least >= seconds or side >= _LARGEST:
      return rate
    # Overshoot by half to save a step; a small product says little of the peak.
    growth = min(4.0, (1.5 * seconds / least) ** (1 / 3))
    side = min(_LARGEST, 128 * math.ceil(side * growth / 128))


def _device() -> jax.Device:
  """Returns JAX's default device, which need not be the first one."""
  return next(iter(jnp.zeros(()).devices()))


def cpu_model() -> str:
  """Returns the CPU's model name, e.g. "AMD EPYC"."""
  with contextlib.suppress(OSError):  # not Linux
    text = Path("/proc/cpuinfo").read_text()
    if match := re.search(r"^model name\s*:[ \t]*(\S.*)$", text, re.MULTILINE):
      return match[1].strip()
  return platform.processor() or platform.machine() or "unknown CPU"


def cpu_cores() -> int:
  """Returns the number of CPU cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def fingerprint() -> str:
  """Returns 16 hex digits that identify host, device, JAX and XLA flags."""
  device = _device()
  parts = (
    platform.node(),
    cpu_model(),
    cpu_cores(),
    device.platform,
    device.device_kind,
    jax.device_count(device.platform),
    jax.__version__,
    os.environ.get("XLA_FLAGS", ""),  # e.g. tests want unoptimized code
    os.environ.get("SPECDEC_KERNELS", ""),  # off: passes take longer
    "huge pages",  # without them less was read
  )
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def device_name() -> str:
  """Names the default device: "TPU v5 lite", "AMD EPYC, 2 cores"."""
  device = _device()
  if device.platform == "cpu":
    return f"{cpu_model()}, {cpu_cores()} cores"
  return device.device_kind


def local(
  folder: str | Path = "~/.cache/specdec/hardware",
  progress: Callable[[str], None] | None = None,
) -> Hardware:
  """Returns the rates of this machine, measured once (~10 s) and then cached.

  Args:
    folder: one JSON file a machine, named by its fingerprint. An unreadable
      file is measured again; a failed write is only reported to `progress`.
    progress: called with a line for each step, e.g. "reading 64 MiB".
  """
  progress = progress or (lambda _: None)
  path = Path(folder).expanduser() / f"{fingerprint()}.json"
  with contextlib.suppress(OSError, ValueError):  # absent or damaged
    return Hardware.from_json(path.read_text(encoding="utf-8"))
  hardware = _measure(progress)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_file(path, hardware.to_json())
  except OSError as error:
    progress(f"not cached: {error}")
  return hardware


def _measure(progress: Callable[[str], None]) -> Hardware:
  """Times the default device."""
  memory, free = device_memory()
  bandwidth = []
  for size in _SIZES:
    if not bandwidth or free is None or size <= free // 4:
      progress(f"reading {size >> 20} MiB")
      bandwidth.append((size, measure_bandwidth(size)))
  size = bandwidth[-1][0]
  progress(f"copying {size >> 21} MiB")
  copy_bandwidth = measure_copy(size)
  flops = {}
  for dtype in _DTYPES:
    progress(f"multiplying {dtype}")
    if (rate := measure_flops(dtype)) is not None:
      flops[dtype] = rate
  return Hardware(
    name=device_name(),
    memory=memory,
    bandwidth=tuple(bandwidth),
    copy_bandwidth=copy_bandwidth,
    flops=flops,
    date=datetime.date.today().isoformat(),
    jax_version=jax.__version__,
  )


def device_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
  """Returns (total, free) bytes of the default device; None where unreported.

  For a CPU these are the machine's, or the tightest enclosing cgroup's.

  Args:
    root: the file system that holds /proc and /sys.
  """
  device = _device()
  if device.platform != "cpu":
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return limit, limit and limit - stats.get("bytes_in_use", 0)
  try:
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":") for line in lines)
    total, free = (
      int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable")
    )
  except (OSError, KeyError):
    if not (hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names):
      return None, None
    total = free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  for limit, unused in _cgroup_memory(root):
    total, free = min(total, limit), min(free, unused)
  return total, free


# cgroup mount point, the files of its limit and usage in bytes, and the key in
# memory.stat of reclaimable page cache.
_CGROUP_2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
_CGROUP_1 = (
  "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
  "total_inactive_file",
)  # fmt: skip


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
  """Yields (limit, free) bytes of every limited cgroup around this process."""
  try:
    lines = (root / "proc/self/cgroup").read_text().splitlines()
  except OSError:
    return  # not Linux
  for line in lines:
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
      continue
    base, limit, usage, cached = _CGROUP_1 if controllers else _CGROUP_2
    group = root / base / path.strip("/")
    for folder in (group, *group.parents):
      if not folder.is_relative_to(root / base):
        break
      try:
        allowed = int((folder / limit).read_text())  # or "max"
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text().split()
        used -= int(dict(zip(stat[::2], stat[1::2])).get(cached, 0))
      except (OSError, ValueError):
        continue  # unlimited, or another container's view
      yield allowed, max(0, allowed - used)
