"""Estimates bytes and seconds of an all-reduce over a chip's interconnect.

After the scaling book (jax-ml/scaling-book, tpus.md and gpus.md): a ring sends
in both directions at once, a line in one; small messages are bound by hop
latency.
"""

from typing import NamedTuple

from specdec.roofline.chips import Chip


class Traffic(NamedTuple):
  """A collective, per chip."""

  size: float  # bytes sent
  seconds: float


def arranged(ways: int, axes: int) -> tuple[int, ...]:
  """Returns axis lengths of a near-cubic torus of `ways` chips: 8, 2 -> (4, 2).

  Axes of length 1 are left out.
  """
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
