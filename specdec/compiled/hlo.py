"""Parses the text of a compiled program (optimised HLO).

Invariant: a loop with a constant trip count is counted that often, any other as
often as the caller states (default once).
"""

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from typing import NamedTuple

_BYTES = {
  "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1,
  "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2,
  "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "f4e2m1fn": 0.5,
}  # fmt: skip
_FLOAT8 = "f8e3m4 f8e4m3 f8e4m3fn f8e4m3b11fnuz f8e4m3fnuz f8e5m2 f8e5m2fnuz"
_BYTES |= dict.fromkeys([*_FLOAT8.split(), "f8e8m0fnu"], 1)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


class Buffer(NamedTuple):
  """An array in a program."""

  dtype: str
  shape: tuple[int, ...]
  layout: str

  @property
  def bytes(self) -> float:
    """Bytes in memory: a TPU pads the two minor dimensions to whole tiles."""
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
    """Bytes of the values, without padding."""
    return _BYTES.get(self.dtype, 0) * math.prod(self.shape)

  @property
  def on_chip(self) -> bool:
    """Whether it lies in on-chip memory (memory space S(n))."""
    return "S(" in self.layout


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation."""

  name: str
  op: str
  buffers: tuple[Buffer, ...]  # of its result type
  operands: tuple[str, ...]  # names of instructions
  line: str

  @property
  def root(self) -> bool:
    """Whether it is its computation's root."""
    return self.line.lstrip().startswith("ROOT")

  @property
  def source(self) -> str:
    """JAX's name of the operation, '' if absent."""
    match = re.search(r'op_name="([^"]*)"', self.line)
    return match[1] if match else ""

  @property
  def results(self) -> tuple[Buffer, ...]:
    """Output buffers; the type of a `-start` also lists its inputs, first."""
    buffers = self.buffers
    if len(buffers) > 1:  # drops scalar contexts
      buffers = tuple(b for b in buffers if b.shape) or buffers
    if self.op.endswith("-start") and self.op != "all-reduce-start":
      buffers = buffers[len(buffers) // 2 :]
    return buffers

  def attribute(self, name: str) -> str | None:
    """Returns the computation that an attribute (calls, body) names."""
    match = re.search(rf"\b{name}=%?([\w.-]+)", self.line)
    return match and match[1]


def _closing(text: str) -> int:
  """Returns the index that closes the bracket at text[0]."""
  depth = 0
  for i, letter in enumerate(text):
    depth += (letter in "({[") - (letter in ")}]")
    if not depth:
      return i
  return len(text)


def _instruction(line: str) -> Instruction | None:
  """Parses one line; None if it is no instruction."""
  match = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)
  if not match:
    return None
  rest = match[2]
  end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
  kind, rest = rest[:end], rest[end + 1 :]
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
    match[1], op[1], buffers, tuple(re.findall(r"%([\w.-]+)", arguments)), line
  )


NO_COUNTS: Mapping[str, float] = types.MappingProxyType({})


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
      elif instruction := _instruction(line):
        current[instruction.name] = instruction

  def called(self, one: Instruction, attribute: str = "calls"):
    """Returns the computation that an instruction names, {} if none."""
    return self.computations.get(one.attribute(attribute) or "", {})

  def runs(
    self, unknown: Mapping[str, float] = NO_COUNTS
  ) -> list[tuple[Instruction, dict[str, Instruction], float]]:
    """Lists executed instructions, fused ones excluded.

    Args:
      unknown: trip counts to assume for loops without a constant one: of the
        first name that is part of JAX's name of the loop; 1 if there is none.

    Returns:
      (instruction, its computation, times executed).
    """
    executed = []

    def visit(computation: dict[str, Instruction], times: float) -> None:
      for one in computation.values():
        executed.append((one, computation, times))
        if one.op == "while":
          count = self._trip_count(one, computation)
          if count is None:
            named = (n for name, n in unknown.items() if name in one.source)
            count = next(named, 1.0)
          total = times * count
          visit(self.called(one, "body"), total)
          visit(self.called(one, "condition"), total)
        elif one.op == "conditional":
          branches = re.search(r"branch_computations=\{([^}]*)\}", one.line)
          for name in re.findall(r"[\w.-]+", branches[1]) if branches else ():
            visit(self.computations.get(name, {}), times)
          for name in ("true_computation", "false_computation"):
            visit(self.called(one, name), times)
        elif one.op == "call":
          visit(self.called(one, "to_apply"), times)
        elif one.op.endswith("-start"):
          visit(self.called(one), times)

    visit(self.computations.get(self.entry, {}), 1.0)
    return executed

  def _trip_count(self, loop: Instruction, around) -> int | None:
    """Returns a loop's constant trip count, None if unknown.

    Takes the compiler's annotation, or a condition `i < constant` whose i
    starts at a constant.
    """
    annotation = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
    if annotation:
      return int(annotation[1])
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
    """Yields a fusion's instructions, nested fusions included."""
    if one.op == "fusion":
      for inner in self.called(one).values():
        yield inner
        yield from self.inside(inner)


def _constant(one: Instruction) -> int | None:
  """Returns the value of an integer constant; None for anything else."""
  match = re.search(r" constant\((-?\d+)\)", one.line)
  return int(match[1]) if match else None
