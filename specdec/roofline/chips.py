"""Accelerators by their datasheets: memory, bandwidth, FLOP/s, links.

Each number is the vendor's, or where two sources disagree the one that says it
was measured or is the more cautious; `source` names them. Peaks are of dense
arithmetic. Every number can be overridden (`get`).
"""

import dataclasses
from collections.abc import Mapping

from specdec.roofline.hardware import Hardware
from specdec.utils.spelling import choices

TYPES = ("float32", "bfloat16", "int8", "fp8")  # of products' factors


@dataclasses.dataclass(frozen=True)
class Chip:
  """One accelerator.

  Attributes:
    memory: bytes.
    bandwidth: bytes/s of its main memory.
    flops: operations/s by the type of a product's factors: bfloat16, int8, fp8;
      of this machine what was measured.
    link_bandwidth: bytes/s of one link one way (a torus), or of the chip into
      its switch.
    axes: of the torus; 0: all chips hang on a switch.
    wrap: an axis of a multiple of so many chips is a ring, any other a line.
    hop_seconds: latency of a hop.
    rows: a product's rows are filled up to a multiple of it.
    source: of these numbers.
    caches: (bytes of a working set, B/s at which sets up to that are read over
      and over), ascending; larger ones come from main memory.
  """

  name: str
  memory: float
  bandwidth: float
  flops: Mapping[str, float]
  link_bandwidth: float
  axes: int
  wrap: int
  hop_seconds: float
  rows: int
  source: str
  caches: tuple[tuple[float, float], ...] = ()

  def __post_init__(self):
    for name in ("memory", "bandwidth", "link_bandwidth", "rows", "wrap"):
      if not getattr(self, name) > 0:
        raise ValueError(f"chip {self.name}: {name} must be > 0")
    if not self.flops or not all(rate > 0 for rate in self.flops.values()):
      raise ValueError(f"chip {self.name}: flops must be rates by type, > 0")
    if not (self.axes >= 0 and self.hop_seconds >= 0):
      raise ValueError(f"chip {self.name}: axes and hop_seconds must be >= 0")

  def rate(self, dtype: str) -> float:
    """Operations/s of a product of such factors.

    Raises:
      ValueError: the chip has no such product.
    """
    if dtype not in self.flops:
      raise ValueError(
        f"{self.name} has no products of {dtype}; it has: "
        + ", ".join(self.flops)
      )
    return self.flops[dtype]

  def ridge(self, dtype: str = "bfloat16") -> float:
    """Operations for each byte, from which on arithmetic is waited for."""
    return self.rate(dtype) / self.bandwidth

  def read_bandwidth(self, size: float) -> float:
    """Bytes/s at which so many bytes are read over and over."""
    fitting = [rate for limit, rate in self.caches if size <= limit]
    return fitting[0] if fitting else self.bandwidth


_GIB = 2**30
_HOP = 1e-6  # scaling-book, tpus.md: about 1 us; a switch is counted as a hop


def _tpu(name, memory, bandwidth, bf16, link, axes, source, **flops):
  # A ring needs a whole pod's axis where pods are 16 wide, else a cube's.
  wrap = 4 if axes == 3 else 16
  rates = {"bfloat16": bf16, **flops}
  return Chip(name, memory, bandwidth, rates, link, axes, wrap, _HOP, 8, source)


def _gpu(name, memory, bandwidth, bf16, link, source, **flops):
  rates = {"bfloat16": bf16, **flops}
  return Chip(name, memory, bandwidth, rates, link, 0, 1, _HOP, 8, source)


_CHIPS = (
  _tpu(
    "v3", 32 * _GIB, 9.0e11, 1.23e14, 1e11, 2,
    "cloud.google.com; link: scaling-book",
  ),
  _tpu(
    "v4", 32 * _GIB, 1.2e12, 2.75e14, 4.5e10, 3,
    "cloud.google.com; link: scaling-book", int8=2.75e14,
  ),
  _tpu(
    "v5e", 16 * _GIB, 8.19e11, 1.97e14, 4.5e10, 2,
    "cloud.google.com; link: scaling-book", int8=3.94e14,
  ),
  _tpu(
    "v5p", 95 * _GIB, 2.765e12, 4.59e14, 9e10, 3,
    "cloud.google.com (jax 0.10.2 says 2.46e12 B/s); link: scaling-book",
    int8=9.18e14, fp8=4.59e14,
  ),
  _tpu(
    "v6e", 32 * _GIB, 1.638e12, 9.18e14, 9e10, 2,
    "cloud.google.com; fp8: jax 0.10.2; link: scaling-book",
    int8=1.836e15, fp8=9.18e14,
  ),
  _tpu(
    "v7", 192 * _GIB, 7.38e12, 2.307e15, 9e10, 3,
    "cloud.google.com; link: 0.9 of its 1e11, as of v5e to v6e",
    fp8=4.614e15,
  ),
  _gpu(
    "a100", 80e9, 2.039e12, 3.12e14, 3e11,
    "NVIDIA by scaling-book gpus.md; bandwidth: LLM-Viewer", int8=6.24e14,
  ),
  _gpu(
    "h100", 80e9, 3.35e12, 9.9e14, 4.5e11,
    "NVIDIA by scaling-book gpus.md", int8=1.98e15, fp8=1.98e15,
  ),
  _gpu(
    "h200", 141e9, 4.8e12, 9.9e14, 4.5e11,
    "NVIDIA by scaling-book gpus.md", int8=1.98e15, fp8=1.98e15,
  ),
  _gpu(
    "b200", 180e9, 8e12, 2.25e15, 9e11,
    "NVIDIA by scaling-book gpus.md; memory: what is usable",
    int8=4.5e15, fp8=4.5e15,
  ),
)  # fmt: skip
CHIPS = {chip.name: chip for chip in _CHIPS}


def get(name: str, **changes) -> Chip:
  """A chip by its name, with some of its numbers replaced (`changed`).

  Raises:
    ValueError: there is no such chip, or no such number.
  """
  if name not in CHIPS:
    raise ValueError(
      f"no chip {name!r}; {choices(name, CHIPS)}; local is this machine"
    )
  return changed(CHIPS[name], **changes)


def changed(chip: Chip, **numbers) -> Chip:
  """The chip with other numbers; one that is named like a type, int8=2e14 say,
  is its rate of products.

  Raises:
    ValueError: it has no such number, or one is impossible.
  """
  known = {f.name for f in dataclasses.fields(Chip)} - {"name", "source"}
  known -= {"flops", "caches"}
  flops = dict(chip.flops)
  for name in list(numbers):
    if name in TYPES:
      flops[name] = numbers.pop(name)
    elif name not in known:
      raise ValueError(
        f"a chip has no number {name!r}; it has: "
        f"{', '.join(sorted(known))}; rates: {', '.join(TYPES)}"
      )
    elif name in ("axes", "wrap", "rows"):
      if numbers[name] != int(numbers[name]):
        raise ValueError(f"{name} = {numbers[name]}; it must be whole")
      numbers[name] = int(numbers[name])
  return dataclasses.replace(chip, flops=flops, **numbers)


def of_hardware(found: Hardware) -> Chip:
  """This machine, as it was measured; alone, so its link is its memory."""
  (_, slowest), *_ = found.bandwidth[::-1]
  return Chip(
    name=found.name,
    memory=found.memory or float("inf"),
    bandwidth=slowest,
    flops=dict(found.flops),
    link_bandwidth=found.copy_bandwidth,
    axes=0,
    wrap=1,
    hop_seconds=0.0,
    rows=1,
    source=f"measured on {found.date}",
    caches=tuple(
      (size, found.read_bandwidth(size)) for size, _ in found.bandwidth[:-1]
    ),
  )
