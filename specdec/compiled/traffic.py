"""Counts a compiled program's traffic: collectives and main memory.

Invariant: buffers in on-chip memory (S(1) in a layout) cause no main-memory
traffic; a slice read from a buffer, or written into it in place, counts by the
slice's size; a buffer that a fusion only hands on counts nothing.
"""

import collections
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from specdec.compiled import hlo

COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute", "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Operations that name or forward buffers without touching them.
_FREE = frozenset((
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota",
  "after-all", "partition-id", "replica-id", "opt-barrier", "copy-done",
  "add-dependency", "while", "conditional", "call", "custom-call-done",
))  # fmt: skip
# Custom calls without traffic.
_FREE_CALLS = frozenset(
  ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
)
_SLICES = ("dynamic-slice", "slice", "gather")
# What opens and closes a collective that runs along with other fusions.
_ENDS = ("AsyncCollectiveStart", "AsyncCollectiveDone")


class Exchange(NamedTuple):
  """A collective."""

  kind: str
  shape: tuple[tuple[int, ...], ...]  # of the results on each chip
  bytes: float  # of the results, per execution
  times: float
  source: str


def exchanges(
  program: hlo.Program, unknown: Mapping[str, float] = hlo.NO_COUNTS
) -> list[Exchange]:
  """Lists executed collectives; `unknown` as in hlo.Program.runs.

  A TPU runs a collective along with computations in several fusions, each of
  which shows it: it counts once.
  """
  collectives, fused = [], set()
  for outer, _, times in program.runs(unknown):
    if not times:
      continue
    for one in (outer, *program.inside(outer)):
      kind = one.op.removesuffix("-start")
      if kind in COLLECTIVES:
        channel = _channel(one)
        if one is not outer and channel:
          if channel in fused:
            continue
          fused.add(channel)
        buffers = one.results
        shapes = tuple(b.shape for b in buffers)
        size = sum(b.payload for b in buffers)
        collectives.append(Exchange(kind, shapes, size, times, one.source))
  return collectives


def _channel(one: hlo.Instruction) -> str | None:
  """Returns a collective's channel, None if it has none."""
  channel = re.search(r"channel_id=(\d+)", one.line)
  return channel and channel[1]


def by_kind(collectives: list[Exchange]) -> dict[str, tuple[float, float]]:
  """Returns kind -> (executions, total bytes), most bytes first."""
  sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
  for one in collectives:
    sums[one.kind][0] += one.times
    sums[one.kind][1] += one.times * one.bytes
  ordered = sorted(sums.items(), key=lambda item: -item[1][1])
  return {kind: (count, size) for kind, (count, size) in ordered}


def gathered(
  collectives: list[Exchange], shapes: Collection[tuple[int, ...]]
) -> list[Exchange]:
  """Returns the all-gathers after which a chip holds all of such an array.

  Args:
    shapes: of arrays that are shared out; their dimensions may have changed
      places.
  """

  def sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))

  whole = {sides(shape) for shape in shapes}
  return [
    one
    for one in collectives
    if one.kind == "all-gather"
    and any(sides(shape) in whole for shape in one.shape)
  ]


class Touched(NamedTuple):
  """An instruction's main-memory traffic."""

  name: str
  op: str
  read: float  # bytes per execution
  written: float
  times: float
  source: str


def touches(
  program: hlo.Program, unknown: Mapping[str, float] = hlo.NO_COUNTS
) -> list[Touched]:
  """Lists every instruction's main-memory traffic.

  `unknown` as in hlo.Program.runs. A collective in several fusions counts in
  the first, as in `exchanges`.
  """
  touched: list[Touched] = []
  fused: set[str] = set()
  for one, around, times in program.runs(unknown):
    if one.op in _FREE or one.op.endswith("-done"):
      continue
    target = re.search(r'custom_call_target="(\w+)"', one.line)
    if (target and target[1] in _FREE_CALLS) or _is_there(one, around):
      continue
    if not times:
      continue
    read, written = _traffic(program, one, around, fused)
    if read or written:
      entry = Touched(one.name, one.op, read, written, times, one.source)
      touched.append(entry)
  return touched


def _is_there(one: hlo.Instruction, around) -> bool:
  """Whether a copy brings what the last run of the program has brought already:
  at its end, by another copy of the same buffer."""
  return "cross_program_prefetch_index" in one.line and any(
    other.op == one.op and other.operands == one.operands
    for other in around.values()
    if other is not one
  )


def _outside(buffers) -> float:
  return sum(b.bytes for b in buffers if not b.on_chip)


def _traffic(program: hlo.Program, one: hlo.Instruction, around, fused):
  """Returns bytes (read, written) of one instruction; `fused` as of _fusion."""
  operands = [
    around[name].buffers if name in around else () for name in one.operands
  ]
  if one.op == "copy-start":  # (destination, source, context)
    return _outside(operands[0]), _outside(one.buffers[:1])
  if one.op == "dynamic-update-slice":
    return _outside(operands[1]), _outside(operands[1])
  if one.op.removesuffix("-start") in _SLICES:
    size = sum(b.bytes for b in one.results)
    return (size if _outside(operands[0]) else 0.0), _outside(one.results)
  if one.op == "fusion":
    return _fusion(program, one, operands, fused)
  if one.op.endswith("-start") and program.called(one):
    return 0.0, 0.0  # Program.runs visits its computation
  return sum(map(_outside, operands)), _outside(one.results)


def _uses(program: hlo.Program, inside: dict[str, hlo.Instruction], name: str):
  """Yields the uses of a value as (user, operand name, computation).

  Looks through bitcasts and fusions.
  """
  for user in inside.values():
    if name not in user.operands:
      continue
    if user.op == "bitcast":
      yield from _uses(program, inside, user.name)
    elif user.op == "fusion":
      called = program.called(user)
      for parameter, number in _parameters(called).items():
        if user.operands[number] == name:
          yield from _uses(program, called, parameter)
          if _passed_on(called, parameter):
            yield from _uses(program, inside, user.name)
    else:
      yield user, name, inside


def _passed_on(inside: dict[str, hlo.Instruction], name: str) -> bool:
  """Whether a value is its computation's root, up to bitcasts."""
  if inside[name].root:
    return True
  return any(
    _passed_on(inside, user.name)
    for user in inside.values()
    if user.op == "bitcast" and name in user.operands
  )


def _parameters(inside: dict[str, hlo.Instruction]) -> dict[str, int]:
  """Returns parameter name -> number."""
  return {
    one.name: int(re.search(r"parameter\((\d+)\)", one.line)[1])
    for one in inside.values()
    if one.op == "parameter"
  }


def _handed_on(
  one: hlo.Instruction, inside: dict[str, hlo.Instruction], begun: set[str]
) -> tuple[set[str], set[int]]:
  """Finds what a fusion only hands on, for a collective that runs along.

  Args:
    begun: names of the fusion's collectives that an earlier fusion began.

  Returns:
    Names of the root's operands that are handed on; places in the fusion's
    result that are not written.
  """
  root = next((x for x in inside.values() if x.root), None)
  aliased = re.search(r"output_to_operand_aliasing=\{(.*?)\}, ", one.line)
  if not root or not aliased:
    return set(), set()
  pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliased[1])
  numbers = {int(place or 0): int(number) for place, number in pairs}
  target = re.search(r'custom_call_target="(\w+)"', root.line)
  if target and target[1] in _ENDS:
    return set(root.operands), set(numbers)
  if root.op != "tuple":
    return set(), set()
  parameters = _parameters(inside)
  same = {
    place
    for place, number in numbers.items()
    if root.operands[place] in begun
    or parameters.get(root.operands[place]) == number
  }
  return {root.operands[place] for place in same}, same


def _fusion(
  program: hlo.Program, one: hlo.Instruction, operands, fused: set[str]
):
  """Returns bytes (read, written) of a fusion.

  Args:
    fused: channels of collectives in fusions before; this one's are added.
  """
  inside = program.called(one)
  channels = {
    x.name: _channel(x) for x in inside.values() if x.op in COLLECTIVES
  }
  begun = {name for name, channel in channels.items() if channel in fused}
  fused.update(filter(None, channels.values()))
  handed_on, same = _handed_on(one, inside, begun)
  read, written, updated = 0.0, 0.0, []
  for name, number in _parameters(inside).items():
    size = _outside(operands[number])
    if not size:
      continue
    partial = 0.0
    for user, via, around in _uses(program, inside, name):
      first = user.operands[0] == via
      if user.name in begun or (user.root and name in handed_on):
        continue
      if user.op in _SLICES and first:
        partial += sum(b.bytes for b in user.buffers)
      elif user.op in ("dynamic-update-slice", "scatter") and first:
        new = user.operands[1 if user.op != "scatter" else -1]
        written += sum(b.bytes for b in around[new].buffers)
        updated.append(operands[number][0].shape)
      else:
        partial = size
        break
    read += min(partial, size)
  for place, buffer in enumerate(one.buffers):
    if place in same:
      continue
    if buffer.shape in updated:  # updated in place; its slices are counted
      updated.remove(buffer.shape)
    elif not buffer.on_chip:
      written += buffer.bytes
  return read, written
