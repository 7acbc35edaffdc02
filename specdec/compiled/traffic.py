"""Counts a compiled program's traffic: collectives and main memory.

Invariant: buffers in on-chip memory (S(1) in a layout) cause no main-memory
traffic; a slice read from a buffer, or written into it in place, counts by the
slice's size.
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
        channel = re.search(r"channel_id=(\d+)", one.line)
        if one is not outer and channel:
          if channel[1] in fused:
            continue
          fused.add(channel[1])
        buffers = one.results
        shapes = tuple(b.shape for b in buffers)
        size = sum(b.payload for b in buffers)
        collectives.append(Exchange(kind, shapes, size, times, one.source))
  return collectives


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

  `unknown` as in hlo.Program.runs.
  """
  touched = []
  for one, around, times in program.runs(unknown):
    if one.op in _FREE or one.op.endswith("-done"):
      continue
    target = re.search(r'custom_call_target="(\w+)"', one.line)
    if (target and target[1] in _FREE_CALLS) or _is_there(one, around):
      continue
    read, written = _traffic(program, one, around)
    if times and (read or written):
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


def _traffic(program: hlo.Program, one: hlo.Instruction, around):
  """Returns bytes (read, written) of one instruction."""
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
    return _fusion(program, one, operands)
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


def _fusion(program: hlo.Program, one: hlo.Instruction, operands):
  """Returns bytes (read, written) of a fusion."""
  inside = program.called(one)
  read, written, updated = 0.0, 0.0, []
  for name, number in _parameters(inside).items():
    size = _outside(operands[number])
    if not size:
      continue
    partial = 0.0
    for user, via, around in _uses(program, inside, name):
      first = user.operands[0] == via
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
  for buffer in one.buffers:
    if buffer.shape in updated:  # updated in place; its slices are counted
      updated.remove(buffer.shape)
    elif not buffer.on_chip:
      written += buffer.bytes
  return read, written
