"""What chips say to one another: bytes and seconds of an all-reduce.

The scaling book's chapters on TPUs and GPUs (jax-ml/scaling-book, tpus.md and
gpus.md): a ring is used both ways at once, a line one way; short messages wait
for the hops instead.
"""

from typing import NamedTuple

from specdec.roofline.chips import Chip


class Traffic(NamedTuple):
  """Of one chip."""

  size: float  # bytes it sends
  seconds: float


def arranged(ways: int, axes: int) -> tuple[int, ...]:
  """`ways` chips on so many axes of a torus, as near to a cube as factors go.

  8 on two axes: (4, 2).
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
  """The sum over `ways` chips of `size` bytes on each, known to all of them.

  A reduce-scatter and an all-gather, each of which moves the whole once.
  """
  if ways == 1:
    return Traffic(0.0, 0.0)
  sent = 2 * size * (ways - 1) / ways
  if chip.axes == 0:
    return Traffic(sent, 2 * chip.hop_seconds + sent / chip.link_bandwidth)
  rate, hops = 0.0, 0.0
  for length in arranged(ways, chip.axes):
    ring = length % chip.wrap == 0
    interleaved = 2.0 if ring else length / (length - 1)
    rate += interleaved * chip.link_bandwidth
    hops += length / 2 if ring else length - 1
  return Traffic(sent, 2 * max(hops * chip.hop_seconds, size / rate))
