"""What a machine can do at best: bytes and operations a second.

Every rate is the best that was seen, so a time it calls impossible was
measured wrongly, or on a machine with fewer neighbours than on that day.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specdec.utils import files

_SIZES = (4 << 20, 16 << 20, 64 << 20, 1 << 30)  # bytes, caches to memory
_DTYPES = ("float32", "bfloat16", "int8")
_ROW = 2048  # float32 values in a row of the matrix that is read
_TIMING = 0.05  # s: far above the tens of microseconds of a call
_LARGEST = 16384  # side of a product that any machine is busy with


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Rates of one machine: of its CPU or of one of its accelerators.

  Raises:
    ValueError: a rate is not positive and finite, or the sizes of `bandwidth`
      do not ascend.
  """

  name: str
  memory: int | None  # bytes in all, None where nobody says
  bandwidth: tuple[tuple[int, float], ...]  # (bytes of a working set, B/s read)
  copy_bandwidth: float  # B/s of a large copy, read and written ones together
  flops: dict[str, float]  # FLOP/s (int8: OP/s) of a large product by dtype
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

  def read_bandwidth(self, working_set: int) -> float:
    """B/s at which `working_set` bytes can be read over and over at most.

    It is that of the largest measured size that is no larger (else of the
    smallest), or of a still larger size that was read faster: a small set is
    never slower to read than a large one, only harder to time.
    """
    base = max(
      (size for size, _ in self.bandwidth if size <= working_set), default=0
    )
    return max(rate for size, rate in self.bandwidth if size >= base)

  def to_json(self) -> str:
    """The text that `from_json` reads."""
    return json.dumps(dataclasses.asdict(self), indent=2)

  @classmethod
  def from_json(cls, text: str) -> "Hardware":
    """An equal Hardware from the text of `to_json`.

    Raises:
      ValueError: the text is anything else.
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
  """Least seconds of `call`, after one that compiles and touches the memory."""
  jax.block_until_ready(call())
  least = math.inf
  for _ in range(repeats):
    begin = time.perf_counter()
    jax.block_until_ready(call())
    least = min(least, time.perf_counter() - begin)
  return least


def _steady(run: Callable[[int], Any], repeats: int) -> float:
  """Least seconds of a pass; run(n) makes n of them, enough to be timed."""
  passes = 1
  while True:
    seconds = _best(functools.partial(run, passes), repeats)
    if seconds >= _TIMING:
      return seconds / passes
    passes = math.ceil(1.5 * passes * _TIMING / seconds)


@functools.partial(jax.jit, static_argnums=2)
def _reads(matrix: jax.Array, vector: jax.Array, passes: int) -> jax.Array:
  """Reads [rows, _ROW] `passes` times; [_ROW], to be ignored.

  Every pass needs the vector of the one before, so XLA can hoist none, and a
  maximum over the rows, so it can leave none of them out. `passes` is static:
  with a bound of its own a loop on a GPU asks the host after each pass.
  """

  def one(_, vector):
    return vector + 1e-30 * jnp.max(matrix @ vector)

  return lax.fori_loop(0, passes, one, vector)


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(source: jax.Array, target: jax.Array) -> jax.Array:
  """-source [n] in the memory of `target` [n]; a bare copy might be elided."""
  return -source


@jax.jit
def _square(matrix: jax.Array) -> jax.Array:
  """matrix @ matrix [n, n]; int8 is summed in int32."""
  wide = jnp.int32 if matrix.dtype == jnp.int8 else None
  return lax.dot(matrix, matrix, preferred_element_type=wide)


def measure_bandwidth(size: int, repeats: int = 5) -> float:
  """B/s read by products of one matrix and vectors, on the default device.

  Args:
    size: bytes of the float32 matrix, rounded down to rows of 8 KiB, one at
      least. It is read again and again in one program, so a small one stays
      in the caches, and the call itself does not count.
    repeats: timings, the best of which is given.
  """
  matrix = jnp.ones((max(1, size // (4 * _ROW)), _ROW), jnp.float32)
  vector = jnp.ones((_ROW,), jnp.float32)
  seconds = _steady(functools.partial(_reads, matrix, vector), repeats)
  return matrix.nbytes / seconds


def measure_copy(size: int, repeats: int = 5) -> float:
  """B/s, read and written ones together, of a float32 copy.

  Args:
    size: bytes of source and target together; both are mapped already, as a
      target fresh from the system would cost a page fault every few KiB.
    repeats: timings, the best of which is given.
  """
  source = jnp.ones((max(1, size // 8),), jnp.float32)
  target = jnp.zeros_like(source)

  def run(passes):
    nonlocal target
    for _ in range(passes):
      target = _copy(source, target)
    return target

  return 2 * source.nbytes / _steady(run, repeats)


def measure_flops(
  dtype: str, seconds: float = 0.2, repeats: int = 3
) -> float | None:
  """FLOP/s (int8: OP/s) of a square product at JAX's default precision.

  That precision is lower than float32 on many accelerators.

  Args:
    dtype: of both factors.
    seconds: the side grows until a product takes as long.
    repeats: timings, the best of which is given.

  Returns:
    None where the backend has no such product.
  """
  side, rate = 256, None
  while True:
    try:
      matrix = jnp.ones((side, side), dtype)
      least = _best(functools.partial(_square, matrix), repeats)
    except jax.errors.JaxRuntimeError:
      return rate  # no such product, or no memory for a larger one
    rate = 2 * side**3 / least
    if least >= seconds or side >= _LARGEST:
      return rate
    # The half more spares a last step; a small product tells little of speed.
    growth = min(4.0, (1.5 * seconds / least) ** (1 / 3))
    side = min(_LARGEST, 128 * math.ceil(side * growth / 128))


def cpu_model() -> str:
  """The CPU's name as the system tells it, e.g. "AMD EPYC"."""
  try:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
      key, _, value = line.partition(":")
      if key.strip() == "model name" and value.strip():
        return value.strip()
  except OSError:
    pass  # not Linux
  return platform.processor() or platform.machine() or "unknown CPU"


def cpu_cores() -> int:
  """CPU cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def fingerprint() -> str:
  """16 hex digits that change with whatever the rates here depend on."""
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
  )
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def device_name() -> str:
  """The default device's, e.g. "TPU v5 lite" or "AMD EPYC, 2 cores"."""
  device = _device()
  if device.platform == "cpu":
    return f"{cpu_model()}, {cpu_cores()} cores"
  return device.device_kind


def local(
  refresh: bool = False,
  folder: str | Path = "~/.cache/specdec/hardware",
  progress: Callable[[str], None] | None = None,
) -> Hardware:
  """The machine at hand: measured once, in some ten seconds, then kept.

  Args:
    refresh: measure even if this machine is in `folder`.
    folder: has a JSON file for each machine, named by its fingerprint. One
      that cannot be read is measured anew; one that cannot be written is
      reported to `progress` only.
    progress: told what is going on, e.g. "reading 64 MiB".
  """
  progress = progress or (lambda _: None)
  path = Path(folder).expanduser() / f"{fingerprint()}.json"
  if not refresh:
    try:
      return Hardware.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
      pass  # not there or damaged
  hardware = _measured(progress)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace_file(path, hardware.to_json())
  except OSError as error:
    progress(f"not kept: {error}")
  return hardware


def _measured(progress: Callable[[str], None]) -> Hardware:
  """The rates of the default device, timed now."""
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
    rate = measure_flops(dtype)
    if rate is not None:
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


def _device() -> jax.Device:
  """Where JAX puts an array that nobody places; not always the first one."""
  return next(iter(jnp.zeros(()).devices()))


def device_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
  """Bytes in all and free ones, default device; None where nobody says.

  Of a CPU: of the machine, or of the cgroup that leaves this process least.

  Args:
    root: below it lie /proc and /sys.
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
  for limit, left in _cgroup_memory(root):
    total, free = min(total, limit), min(free, left)
  return total, free


# Where a cgroup's folder lies, and the names of its limit, of what it uses,
# and, in memory.stat, of cached files that would make room. In bytes.
_CGROUP_2 = (
  "sys/fs/cgroup",
  "memory.max",
  "memory.current",
  "inactive_file",
)
_CGROUP_1 = (
  "sys/fs/cgroup/memory",
  "memory.limit_in_bytes",
  "memory.usage_in_bytes",
  "total_inactive_file",
)


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
  """Bytes (allowed, free) of each limited cgroup that holds this process."""
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
