"""Reading optimised HLO: its computations, its loops, its products."""

import collections
import re


def computations(hlo):
  """Name -> lines of every computation of an HLO text; the entry is ''."""
  found, lines = {}, []
  for line in hlo.splitlines():
    header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
    if header:
      lines = found["" if header[1] else header[2]] = []
    elif " = " in line:
      lines.append(line.strip())
  return found


def called(line, found):
  """Names of the computations that a line calls."""
  words = re.findall(r"[=,{ ]%?([\w.-]+)", line.split(" = ", 1)[1])
  return [word for word in words if word in found]


def in_loops(hlo):
  """Lines of all loop bodies, and of what they call however indirectly."""
  found = computations(hlo)
  todo = re.findall(r"\bbody=%?([\w.-]+)", hlo)
  seen = set()
  while todo:
    name = todo.pop()
    if name not in seen:
      seen.add(name)
      for line in found[name]:
        todo += called(line, found)
  return [line for name in sorted(seen) for line in found[name]]


def products(hlo, pattern):
  """How often products whose op_name has `pattern` run, by what it captured
  and their first dimension: Counter[(captured, rows)]."""
  found, counts = computations(hlo), collections.Counter()

  def visit(name, times):
    for line in found[name]:
      dot = re.search(r" = \w+\[(\d+)[\d,]*\]\S* dot\(", line)
      match = re.search(pattern, line)
      if dot and match:
        counts[match[1], int(dot[1])] += times
      trips = 1
      if " while(" in line:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
        trips = int(known[1]) if known else float("nan")
      for other in called(line, found):
        visit(other, times * trips)

  visit("", 1)
  return counts
