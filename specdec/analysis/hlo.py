"""What a compiled program moves, read off its optimised HLO.

Bytes between chips by kind of collective, and bytes of main memory. Invariant:
loops of a known length count that often, others as often as the caller says
(once); what lies in on-chip
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
# Custom calls that move nothing.
_FREE_CALLS = frozenset(
  ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
)
_SLICES = ("dynamic-slice", "slice", "gather")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


class Buffer(NamedTuple):
  """An array of a program."""

  dtype: str
  shape: tuple[int, ...]
  layout: str

  @property
  def bytes(self) -> float:
    """In memory: a TPU pads the two minor dimensions to whole tiles."""
    shape = list(self.shape)
    tile = re.search(r"T\((\d+),(\d+)\)", self.layout)
    order = re.match(r"[\d,]+", self.layout)
    if tile and order and len(shape) > 1:
      minor, second = map(int, order[0].split(",")[:2])
      for place, unit in ((second, int(tile[1])), (minor, int(tile[2]))):
        shape[place] = -(-shape[place] // unit) * unit
    return _BYTES.get(self.dtype, 0) * math.prod(shape)

  @property
  def payload(self) -> float:
    """Of its numbers alone."""
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
  def root(self) -> bool:
    """Whether its computation results in it."""
    return self.line.lstrip().startswith("ROOT")

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

  def called(self, one: Instruction, attribute: str = "calls"):
    """The computation that an instruction names, {} where none."""
    return self.computations.get(one.attribute(attribute) or "", {})

  def runs(
    self, unknown: float = 1.0
  ) -> list[tuple[Instruction, dict[str, Instruction], float]]:
    """Every instruction that the program runs by itself (not inside a fusion),
    what stands around it, and how often.

    Args:
      unknown: turns of a loop whose length is not known.
    """
    found = []

    def visit(around: dict[str, Instruction], times: float) -> None:
      for one in around.values():
        found.append((one, around, times))
        if one.op == "while":
          known = self._turns(one, around)
          turns = times * (unknown if known is None else known)
          visit(self.called(one, "body"), turns)
          visit(self.called(one, "condition"), turns)
        elif one.op == "conditional":
          several = re.search(r"branch_computations=\{([^}]*)\}", one.line)
          names = re.findall(r"[\w.-]+", several[1]) if several else ()
          for name in names:
            visit(self.computations.get(name, {}), times)
          for name in ("true_computation", "false_computation"):
            visit(self.called(one, name), times)
        elif one.op == "call":
          visit(self.called(one, "to_apply"), times)
        elif one.op.endswith("-start"):
          visit(self.called(one), times)

    visit(self.computations.get(self.entry, {}), 1.0)
    return found

  def _turns(self, loop: Instruction, around) -> int | None:
    """How often a loop runs, where its text says so: by the compiler's own
    count, or by a condition `i < constant` whose i begins with a constant."""
    said = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
    if said:
      return int(said[1])
    condition = self.called(loop, "condition")
    test = next((x for x in condition.values() if x.root), None)
    if test is None or "direction=LT" not in test.line:
      return None
    index, bound = (condition.get(name) for name in test.operands)
    end = bound and _constant(bound)
    place = index and re.search(r"index=(\d+)", index.line)
    begin = around.get(loop.operands[0])
    if end is None or not place or not begin or begin.op != "tuple":
      return None
    first = around.get(begin.operands[int(place[1])])
    while first and first.op == "copy":
      first = around.get(first.operands[0])
    start = first and _constant(first)
    return None if start is None else max(0, end - start)

  def inside(self, one: Instruction):
    """What a fusion consists of, fusions in it opened as well."""
    if one.op == "fusion":
      for inner in self.called(one).values():
        yield inner
        yield from self.inside(inner)


def _constant(one: Instruction) -> int | None:
  """The value of an integer constant; None: it is none."""
  found = re.search(r" constant\((-?\d+)\)", one.line)
  return int(found[1]) if found else None


class Exchange(NamedTuple):
  """A collective."""

  kind: str
  shape: tuple[tuple[int, ...], ...]  # of what each chip has afterwards
  bytes: float  # of that, each time
  times: float
  source: str


def _results(one: Instruction) -> tuple[Buffer, ...]:
  """What an instruction leaves; a `-start` names what goes in before it."""
  buffers = one.buffers
  if len(buffers) > 1:  # contexts are scalars
    buffers = tuple(b for b in buffers if b.shape) or buffers
  if one.op.endswith("-start") and one.op != "all-reduce-start":
    buffers = buffers[len(buffers) // 2 :]
  return buffers


def exchanges(program: Program, unknown: float = 1.0) -> list[Exchange]:
  """Every collective that runs; `unknown` as of Program.runs."""
  found = []
  for outer, _, times in program.runs(unknown):
    if not times:
      continue
    for one in (outer, *program.inside(outer)):
      kind = one.op.removesuffix("-start")
      if kind in COLLECTIVES:
        buffers = _results(one)
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


def traffic(program: Program, unknown: float = 1.0) -> list[Touched]:
  """What every instruction reads and writes of the main memory, in bytes;
  `unknown` as of Program.runs."""
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


def _traffic(program: Program, one: Instruction, around):
  """(read, written) of one instruction."""
  operands = [
    around[name].buffers if name in around else () for name in one.operands
  ]
  if one.op == "copy-start":  # (destination, source, context)
    return _outside(operands[0]), _outside(one.buffers[:1])
  if one.op == "dynamic-update-slice":
    return _outside(operands[1]), _outside(operands[1])
  if one.op.removesuffix("-start") in _SLICES:
    size = sum(b.bytes for b in _results(one))
    return (size if _outside(operands[0]) else 0.0), _outside(_results(one))
  if one.op == "fusion":
    return _fusion(program, one, operands)
  if one.op.endswith("-start") and program.called(one):
    return 0.0, 0.0  # its computation is visited by itself
  return sum(map(_outside, operands)), _outside(_results(one))


def _uses(program: Program, inside: dict[str, Instruction], name: str):
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


def _passed_on(inside: dict[str, Instruction], name: str) -> bool:
  """Whether a value is, bitcasts apart, what a computation results in."""
  if inside[name].root:
    return True
  return any(
    _passed_on(inside, user.name)
    for user in inside.values()
    if user.op == "bitcast" and name in user.operands
  )


def _parameters(inside: dict[str, Instruction]) -> dict[str, int]:
  """Name -> number."""
  return {
    one.name: int(re.search(r"parameter\((\d+)\)", one.line)[1])
    for one in inside.values()
    if one.op == "parameter"
  }


def _fusion(program: Program, one: Instruction, operands):
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
