"""Datasheets of accelerators: memory, bandwidth, FLOP/s, interconnect.

Numbers are the vendor's; where two sources disagree, the measured or the lower
one. `source` names them. Memory is what the vendor lists for one accelerator,
or its share of a system's. Peaks are for dense arithmetic; `inferred` names
those that nobody has published. `get` overrides any.
All-reduces are priced after the scaling book (jax-ml/scaling-book, tpus.md and
gpus.md): a ring sends in both directions at once, a line in one; small messages
are bound by hop latency.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specdec.roofline import hardware
from specdec.roofline.hardware import Hardware
from specdec.utils.spelling import choices

TYPES = ("float32", "bfloat16", "int8", "fp8")  # dtypes of a product's factors


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peak rates of one accelerator."""

  name: str
  memory: float  # bytes
  bandwidth: float  # bytes/s of main memory
  flops: Mapping[str, float]  # FLOP/s (int8: OP/s) by dtype of the factors
  link_bandwidth: float  # bytes/s one way, of a link, or into the switch
  axes: int  # dimensions of the torus; 0: switched
  wrap: int  # a torus axis of a multiple of this length is a ring, else a line
  hop_seconds: float  # latency of a hop
  rows: int  # products pad their rows to a multiple of this
  source: str  # of the numbers
  # (working set in bytes, B/s of re-reading a set up to that size), ascending;
  # larger sets are read from main memory.
  caches: tuple[tuple[float, float], ...] = ()
  inferred: tuple[str, ...] = ()  # dtypes whose rates are not published

  def __post_init__(self):
    for name in ("memory", "bandwidth", "link_bandwidth", "rows", "wrap"):
      if not getattr(self, name) > 0:
        raise ValueError(f"chip {self.name}: {name} must be > 0")
    if not self.flops or not all(rate > 0 for rate in self.flops.values()):
      raise ValueError(f"chip {self.name}: flops must be rates by dtype, > 0")
    if not (self.axes >= 0 and self.hop_seconds >= 0):
      raise ValueError(f"chip {self.name}: axes and hop_seconds must be >= 0")

  def rate(self, dtype: str) -> float:
    """Returns FLOP/s of a product whose factors have this dtype.

    Raises:
      ValueError: the chip does not support that dtype.
    """
    if dtype not in self.flops:
      raise ValueError(
        f"{self.name} has no products of {dtype}; it has: "
        + ", ".join(self.flops)
      )
    return self.flops[dtype]

  def read_bandwidth(self, size: float) -> float:
    """Returns bytes/s of reading `size` bytes repeatedly."""
    rates = [rate for limit, rate in self.caches if size <= limit]
    return rates[0] if rates else self.bandwidth


_GIB = 2**30
_HOP = 1e-6  # scaling-book, tpus.md: about 1 us; a switch counts as one hop


def _chip(
  name, memory, bandwidth, bfloat16, link, axes, source, inferred=(), **flops
):
  # 2D pods wrap around only over a full axis of 16, 3D ones per cube of 4.
  wrap = {0: 1, 2: 16, 3: 4}[axes]
  rates = {"bfloat16": bfloat16, **flops}
  fields = name, memory, bandwidth, rates, link, axes, wrap, _HOP, 8, source
  return Chip(*fields, inferred=inferred)


# Pages: jax-ml.github.io/scaling-book/tpus and /gpus; cloud.google.com/tpu/docs
# with /v3, v4, v5e, v5p, v6e or tpu7x; nvidia.com/en-us/data-center with /l4,
# h100, h200 or gb200-nvl72; amd.com/en/products/accelerators/instinct.
_GOOGLE = "cloud.google.com/tpu/docs; link: scaling-book"
_NVIDIA = "NVIDIA by scaling-book gpus.md"
_PCIE = "NVIDIA datasheet; link: PCIe"
_NIM = "docs.nvidia.com, support matrix of NIM for LLMs 2.0.6"
_TPU8 = (
  "cloud.google.com, TPU 8t and TPU 8i technical deep dive, April 2026; "
  "bfloat16 and fp8 inferred: a quarter and half of its FP4; link: 0.9 of what "
  "is published"
)
_FROM_FP4 = ("bfloat16", "fp8")
_CHIPS = (
  _chip("v3", 32 * _GIB, 9.0e11, 1.23e14, 1e11, 2, _GOOGLE),
  _chip("v4", 32 * _GIB, 1.2e12, 2.75e14, 4.5e10, 3, _GOOGLE, int8=2.75e14),
  _chip("v5e", 16 * _GIB, 8.19e11, 1.97e14, 4.5e10, 2, _GOOGLE, int8=3.94e14),
  _chip(
    "v5p", 95 * _GIB, 2.765e12, 4.59e14, 9e10, 3,
    "cloud.google.com (jax 0.10.2 says 2.46e12 B/s); link: scaling-book",
    int8=9.18e14, fp8=4.59e14,
  ),
  _chip(
    "v6e", 32 * _GIB, 1.638e12, 9.18e14, 9e10, 2,
    "cloud.google.com; fp8: jax 0.10.2; link: scaling-book",
    int8=1.836e15, fp8=9.18e14,
  ),
  _chip(
    "v7", 192 * _GIB, 7.38e12, 2.307e15, 9e10, 3,
    "cloud.google.com; link: 0.9 of its 1e11, as of v5e to v6e", fp8=4.614e15,
  ),
  _chip(
    "v8t", 216e9, 6.528e12, 3.15e15, 1.8e11, 3, _TPU8, _FROM_FP4, fp8=6.3e15
  ),
  _chip(
    "v8i", 288e9, 8.601e12, 2.525e15, 1.08e12, 0,
    f"{_TPU8}; its network taken for a switch", _FROM_FP4, fp8=5.05e15,
  ),
  _chip("l4", 24e9, 3e11, 1.21e14, 3.2e10, 0, _PCIE, int8=2.42e14, fp8=2.42e14),
  _chip("a10g", 24e9, 6e11, 7e13, 3.2e10, 0, _PCIE, int8=1.4e14),
  _chip(
    "rtx4090", 24e9, 1.008e12, 1.652e14, 3.2e10, 0,
    "NVIDIA Ada whitepaper, float32 sums; link: PCIe", int8=6.606e14,
    fp8=3.303e14,
  ),
  _chip(
    "rtx5090", 32e9, 1.792e12, 2.095e14, 6.4e10, 0,
    "NVIDIA RTX Blackwell whitepaper, float32 sums; link: PCIe",
    int8=8.38e14, fp8=4.19e14,
  ),
  _chip(
    "a100", 80e9, 2.039e12, 3.12e14, 3e11, 0,
    "NVIDIA by scaling-book gpus.md; bandwidth: LLM-Viewer", int8=6.24e14,
  ),
  _chip(
    "h100", 80e9, 3.35e12, 9.9e14, 4.5e11, 0, _NVIDIA, int8=1.98e15, fp8=1.98e15
  ),
  _chip(
    "h200", 141e9, 4.8e12, 9.9e14, 4.5e11, 0, _NVIDIA, int8=1.98e15, fp8=1.98e15
  ),
  _chip(
    "b200", 180e9, 8e12, 2.25e15, 9e11, 0,
    f"{_NVIDIA}; memory: {_NIM}",
    int8=4.5e15, fp8=4.5e15,
  ),
  _chip(
    "gb200", 186e9, 8e12, 2.5e15, 9e11, 0,
    "NVIDIA GB200 NVL72 datasheet, of one of its 72 GPUs",
    int8=5e15, fp8=5e15,
  ),
  _chip(
    "b300", 288e9, 8e12, 2.25e15, 9e11, 0,
    "NVIDIA HGX B300 datasheet; its int8 is a fraction of fp8 and left out; "
    f"memory: {_NIM}",
    fp8=4.5e15,
  ),
  _chip(
    "mi300x", 192e9, 5.3e12, 1.3074e15, 4.48e11, 0,
    "AMD datasheet; link: 7 of 64 GB/s", int8=2.6149e15, fp8=2.6149e15,
  ),
  _chip(
    "mi355x", 288e9, 8e12, 2.5166e15, 5.376e11, 0,
    "AMD datasheet; link: 7 of 76.8 GB/s", int8=5.0332e15, fp8=5.0332e15,
  ),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _CHIPS}


def get(
  name: str, progress: Callable[[str], None] | None = None, /, **numbers
) -> Chip:
  """Returns a chip by name, or, for 'local', this machine as measured.

  Args:
    progress: as of hardware.local.
    numbers: replace fields of Chip; a dtype's name sets its FLOP/s (int8=2e14).

  Raises:
    ValueError: there is no such chip or field, or a value is out of range.
  """
  if name == "local":
    chip = of_hardware(hardware.local(progress=progress))
  elif name in CHIPS:
    chip = CHIPS[name]
  else:
    raise ValueError(
      f"no chip {name!r}; {choices(name, CHIPS)}; local is this machine"
    )
  fields = {f.name for f in dataclasses.fields(Chip)}
  fields -= {"name", "source", "flops", "caches", "inferred"}
  flops = {key: numbers.pop(key) for key in TYPES if key in numbers}
  for key, value in numbers.items():
    if key not in fields:
      raise ValueError(
        f"a chip has no number {key!r}; it has: "
        f"{', '.join(sorted(fields))}; rates: {', '.join(TYPES)}"
      )
    if key in ("axes", "wrap", "rows"):
      if value != int(value):
        raise ValueError(f"{key} = {value}; it must be whole")
      numbers[key] = int(value)
  numbers["inferred"] = tuple(x for x in chip.inferred if x not in flops)
  flops = {**chip.flops, **flops}
  return dataclasses.replace(chip, flops=flops, **numbers)


def of_hardware(machine: Hardware) -> Chip:
  """Returns a measured machine as a chip; its link is a copy in memory."""
  *caches, (_, main_memory) = machine.bandwidth
  # A small set is never slower to read than a large one, only harder to time.
  rates = [rate for _, rate in machine.bandwidth]
  fastest = list(itertools.accumulate(reversed(rates), max))[::-1]
  return Chip(
    name=machine.name,
    memory=machine.memory or float("inf"),
    bandwidth=main_memory,
    flops=dict(machine.flops),
    link_bandwidth=machine.copy_bandwidth,
    axes=0,
    wrap=1,
    hop_seconds=0.0,
    rows=1,
    source=f"measured on {machine.date}",
    caches=tuple((size, rate) for (size, _), rate in zip(caches, fastest)),
  )


class Traffic(NamedTuple):
  """A collective, per chip."""

  size: float  # bytes sent
  seconds: float


def arranged(ways: int, axes: int) -> tuple[int, ...]:
  """Returns axes above 1 of a near-cubic torus of `ways` chips: (4, 2) of 8."""
  lengths = [1] * max(axes, 1)
  rest, factor = ways, 2
  factors = []
  while rest > 1:
    while rest % factor == 0:
      factors.append(factor)
      rest //= factor
    factor += 1
  for factor in reversed(factors):
    lengths[lengths.index(min(lengths))] *= factor
  return tuple(sorted((n for n in lengths if n > 1), reverse=True))


def all_reduce(chip: Chip, ways: int, size: float) -> Traffic:
  """Returns the cost of summing `size` bytes on each of `ways` chips.

  A reduce-scatter, then an all-gather; each moves the whole array once.
  """
  if ways == 1:
    return Traffic(0.0, 0.0)
  sent = 2 * size * (ways - 1) / ways
  if chip.axes == 0:
    return Traffic(sent, 2 * chip.hop_seconds + sent / chip.link_bandwidth)
  rate, hops = 0.0, 0.0
  for length in arranged(ways, chip.axes):
    ring = length % chip.wrap == 0
    links = 2.0 if ring else length / (length - 1)
    rate += links * chip.link_bandwidth
    hops += length / 2 if ring else length - 1
  return Traffic(sent, 2 * max(hops * chip.hop_seconds, size / rate))
