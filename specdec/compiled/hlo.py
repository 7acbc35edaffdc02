"""The text of a compiled program (optimised HLO), read.

Invariant: a loop whose length is known counts that often, any other as often as
the caller says (once).
"""

import dataclasses
import math
import re
from typing import NamedTuple

_BYTES = {
  "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
  "s32": 4, "u32": 4, "s64": 8, "u64": 8, "bf16": 2, "f16": 2, "f32": 4,
  "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8,
}  # fmt: skip
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
  buffers: tuple[Buffer, ...]  # of its type
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

  @property
  def results(self) -> tuple[Buffer, ...]:
    """What it leaves; a `-start` names what goes in before that."""
    buffers = self.buffers
    if len(buffers) > 1:  # contexts are scalars
      buffers = tuple(b for b in buffers if b.shape) or buffers
    if self.op.endswith("-start") and self.op != "all-reduce-start":
      buffers = buffers[len(buffers) // 2 :]
    return buffers

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
