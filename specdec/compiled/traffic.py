"""What a compiled program moves: between chips, and of main memory.

Invariant: what lies in on-chip memory (S(1) in a layout) is no traffic of the
main one; a slice that is read from a buffer, or written into it in place,
counts by the slice's size.
"""

import collections
import re
from typing import NamedTuple

from specdec.compiled import hlo

COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
  "collective-permute", "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# They name or pass on buffers and touch none.
_FREE = frozenset((
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota",
  "after-all", "partition-id", "replica-id", "opt-barrier", "copy-done",
  "add-dependency", "while", "conditional", "call", "custom-call-done",
))  # fmt: skip
# Custom calls that move nothing.
_FREE_CALLS = frozenset(
  ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
)
_SLICES = ("dynamic-slice", "slice", "gather")


class Exchange(NamedTuple):
  """A collective."""

  kind: str
  shape: tuple[tuple[int, ...], ...]  # of what each chip has afterwards
  bytes: float  # of that, each time
  times: float
  source: str


def exchanges(program: hlo.Program, unknown: float = 1.0) -> list[Exchange]:
  """Every collective that runs; `unknown` as of hlo.Program.runs."""
  found = []
  for outer, _, times in program.runs(unknown):
    if not times:
      continue
    for one in (outer, *program.inside(outer)):
      kind = one.op.removesuffix("-start")
      if kind in COLLECTIVES:
        buffers = one.results
        shapes = tuple(b.shape for b in buffers)
        size = sum(b.payload for b in buffers)
        found.append(Exchange(kind, shapes, size, times, one.source))
  return found


def by_kind(found: list[Exchange]) -> dict[str, tuple[float, float]]:
  """Kind -> (how many, bytes), in the order of their bytes."""
  sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
  for one in found:
    sums[one.kind][0] += one.times
    sums[one.kind][1] += one.times * one.bytes
  ordered = sorted(sums.items(), key=lambda item: -item[1][1])
  return {kind: (count, size) for kind, (count, size) in ordered}


class Touched(NamedTuple):
  """An instruction's traffic of the main memory."""

  name: str
  op: str
  read: float
  written: float
  times: float
  source: str


def touches(program: hlo.Program, unknown: float = 1.0) -> list[Touched]:
  """What every instruction reads and writes of the main memory, in bytes;
  `unknown` as of hlo.Program.runs."""
  found = []
  for one, around, times in program.runs(unknown):
    if one.op in _FREE or one.op.endswith("-done"):
      continue
    target = re.search(r'custom_call_target="(\w+)"', one.line)
    if target and target[1] in _FREE_CALLS:
      continue
    read, written = _traffic(program, one, around)
    if times and (read or written):
      found.append(Touched(one.name, one.op, read, written, times, one.source))
  return found


def _outside(buffers) -> float:
  return sum(b.bytes for b in buffers if not b.on_chip)


def _traffic(program: hlo.Program, one: hlo.Instruction, around):
  """(read, written) of one instruction."""
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
    return 0.0, 0.0  # its computation is visited by itself
  return sum(map(_outside, operands)), _outside(one.results)


def _uses(program: hlo.Program, inside: dict[str, hlo.Instruction], name: str):
  """(what touches a value, under which name, where), bitcasts and fusions
  looked through."""
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
  """Whether a value is, bitcasts apart, what a computation results in."""
  if inside[name].root:
    return True
  return any(
    _passed_on(inside, user.name)
    for user in inside.values()
    if user.op == "bitcast" and name in user.operands
  )


def _parameters(inside: dict[str, hlo.Instruction]) -> dict[str, int]:
  """Name -> number."""
  return {
    one.name: int(re.search(r"parameter\((\d+)\)", one.line)[1])
    for one in inside.values()
    if one.op == "parameter"
  }


def _fusion(program: hlo.Program, one: hlo.Instruction, operands):
  inside = program.called(one)
  read, written, kept = 0.0, 0.0, []
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
        kept.append(operands[number][0].shape)
      else:
        partial = size
        break
    read += min(partial, size)
  for buffer in one.buffers:
    if buffer.shape in kept:  # written in place: only what is new
      kept.remove(buffer.shape)
    elif not buffer.on_chip:
      written += buffer.bytes
  return read, written
