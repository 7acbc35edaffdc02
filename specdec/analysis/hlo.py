"""What a compiled program moves, read off its optimised HLO.

Bytes between chips by kind of collective, and bytes of main memory. Invariant:
loops of a known length count that often, others once; what lies in on-chip
memory (S(1) in a layout) is no traffic of the main one; a slice that is read
from a buffer, or written into it in place, counts by the slice's size.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

_BYTES = {
  "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
  "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "f32": 4,
  "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8,
}  # fmt: skip
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
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


class Buffer(NamedTuple):
  """An array of a program."""

  dtype: str
  shape: tuple[int, ...]
  layout: str

  @property
  def bytes(self) -> float:
    return _BYTES.get(self.dtype, 0) * math.prod(self.shape)

  @property
  def on_chip(self) -> bool:
    return "S(" in self.layout


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  op: str
  buffers: tuple[Buffer, ...]  # of the result
  operands: tuple[str, ...]  # names
  line: str

  @property
  def source(self) -> str:
    """The name that JAX gave the operation, '' where none."""
    found = re.search(r'op_name="([^"]*)"', self.line)
    return found[1] if found else ""

  def attribute(self, name: str) -> str | None:
    """The computation that an attribute names, e.g. calls or body."""
    found = re.search(rf"\b{name}=%?([\w.-]+)", self.line)
    return found and found[1]


def _split(text: str) -> tuple[str, str]:
  """A type and what follows it."""
  if not text.startswith("("):
    head, _, rest = text.partition(" ")
    return head, rest
  depth = 0
  for i, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if not depth:
      return text[: i + 1], text[i + 2 :]
  return text, ""


def _closing(text: str) -> int:
  """Where the bracket that text begins with is closed."""
  depth = 0
  for i, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if not depth:
      return i
  return len(text)


def _instruction(line: str) -> Instruction | None:
  found = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)
  if not found:
    return None
  kind, rest = _split(found[2])
  op = re.match(r"([a-z][\w-]*)\(", rest)
  if not op:
    return None
  inner = rest[op.end() - 1 :]
  arguments = inner[1 : _closing(inner)]
  buffers = tuple(
    Buffer(d, tuple(map(int, s.split(","))) if s else (), layout or "")
    for d, s, layout in _SHAPE.findall(kind)
    if d in _BYTES
  )
  return Instruction(
    found[1], op[1], buffers, tuple(re.findall(r"%([\w.-]+)", arguments)), line
  )


class Program:
  """The computations of an HLO text."""

  def __init__(self, text: str):
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry = ""
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
      header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
      if header:
        current = self.computations[header[2]] = {}
        self.entry = header[2] if header[1] else self.entry
      elif found := _instruction(line):
        current[found.name] = found

  def runs(self) -> list[tuple[Instruction, dict[str, Instruction], float]]:
    """Every instruction that the program runs by itself (not inside a fusion),
    what stands around it, and how often."""
    found = []

    def visit(name: str, times: float) -> None:
      around = self.computations.get(name, {})
      for one in around.values():
        found.append((one, around, times))
        if one.op == "while":
          known = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.line)
          visit(
            one.attribute("body") or "", times * int(known[1] if known else 1)
          )
        elif one.op == "conditional":
          branches = re.search(r"branch_computations=\{([^}]*)\}", one.line)
          names = (
            re.findall(r"%?([\w.-]+)", branches[1])
            if branches
            else [
              one.attribute("true_computation") or "",
              one.attribute("false_computation") or "",
            ]
          )
          for branch in names:
            visit(branch, times)
        elif one.op == "call":
          visit(one.attribute("to_apply") or "", times)
        elif one.op.endswith("-start") and one.attribute("calls"):
          visit(one.attribute("calls") or "", times)

    visit(self.entry, 1.0)
    return found


class Exchange(NamedTuple):
  """A collective."""

  kind: str
  shape: tuple[tuple[int, ...], ...]  # of what each chip has afterwards
  bytes: float  # of that, each time
  times: float
  source: str


def exchanges(program: Program) -> list[Exchange]:
  """Every collective that runs."""
  found = []
  for one, _, times in program.runs():
    kind = one.op.removesuffix("-start")
    if kind not in COLLECTIVES:
      continue
    buffers = one.buffers
    if one.op.endswith("-start") and kind != "all-reduce":
      buffers = buffers[len(buffers) // 2 :]  # what went in stands before
    buffers = tuple(b for b in buffers if b.dtype != "token")
    found.append(
      Exchange(
        kind,
        tuple(b.shape for b in buffers),
        sum(b.bytes for b in buffers),
        times,
        one.source,
      )
    )
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


def traffic(program: Program) -> list[Touched]:
  """What every instruction reads and writes of the main memory, in bytes."""
  found = []
  for one, around, times in program.runs():
    if one.op in _FREE or one.op.endswith("-done"):
      continue
    read, written = _traffic(program, one, around)
    if read or written:
      found.append(Touched(one.name, one.op, read, written, times, one.source))
  return found


def _result(around: dict[str, Instruction], name: str) -> tuple[Buffer, ...]:
  return around[name].buffers if name in around else ()


def _traffic(program: Program, one: Instruction, around):
  """(read, written) of one instruction."""

  def outside(buffers) -> float:
    return sum(b.bytes for b in buffers if not b.on_chip)

  operands = [_result(around, name) for name in one.operands]
  if one.op == "copy-start":  # (destination, source, context)
    return outside(operands[0]), outside(one.buffers[:1])
  if one.op == "dynamic-update-slice":
    return outside(operands[1]), outside(operands[1])
  if one.op in ("dynamic-slice", "slice", "gather"):
    size = sum(b.bytes for b in one.buffers)
    return (size if outside(operands[0]) else 0.0), outside(one.buffers)
  if one.op == "fusion":
    return _fusion(program, one, operands)
  if one.op.endswith("-start"):  # its computation is visited by itself
    if one.attribute("calls"):
      return 0.0, 0.0
    return sum(map(outside, operands)), 0.0
  return sum(map(outside, operands)), outside(one.buffers)


def _fusion(program: Program, one: Instruction, operands):
  inside = program.computations.get(one.attribute("calls") or "", {})
  parameters = {}
  for inner in inside.values():
    if inner.op == "parameter":
      parameters[inner.name] = int(
        re.search(r"parameter\((\d+)\)", inner.line)[1]
      )
  users = collections.defaultdict(list)
  for inner in inside.values():
    for name in inner.operands:
      users[name].append(inner)

  def uses(name):
    """What touches a value, bitcasts looked through."""
    for user in users[name]:
      if user.op == "bitcast":
        yield from uses(user.name)
      else:
        yield name, user

  read, in_place = 0.0, 0.0
  kept = []
  for name, number in parameters.items():
    buffers = (
      [b for b in operands[number] if not b.on_chip]
      if number < len(operands)
      else []
    )
    if not buffers:
      continue
    size = sum(b.bytes for b in buffers)
    partial = 0.0
    for via, user in uses(name):
      first = user.operands and user.operands[0] == via
      if user.op in ("dynamic-slice", "slice", "gather") and first:
        partial += sum(b.bytes for b in user.buffers)
      elif user.op == "dynamic-update-slice" and first:
        update = inside[user.operands[1]].buffers
        in_place += sum(b.bytes for b in update)
        kept.append(buffers[0].shape)
      elif user.op == "scatter" and first:
        update = inside[user.operands[-1]].buffers
        in_place += sum(b.bytes for b in update)
        kept.append(buffers[0].shape)
      else:
        partial = size
        break
    read += min(partial, size)
  written = 0.0
  for buffer in one.buffers:
    if buffer.on_chip:
      continue
    if buffer.shape in kept:  # written in place: only what is new
      kept.remove(buffer.shape)
    else:
      written += buffer.bytes
  return read, written + in_place
