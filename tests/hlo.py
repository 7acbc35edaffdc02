"""Reading optimised HLO: what its loops run, how often its products run."""

import collections
import math
import re

from specdec.compiled import hlo


def in_loops(text):
  """Lines of all loop bodies, and of what they call however indirectly."""
  computations = hlo.Program(text).computations
  todo, seen = re.findall(r"\bbody=%?([\w.-]+)", text), {}
  while todo:
    name = todo.pop()
    if name not in seen:
      seen[name] = [one.line.strip() for one in computations[name].values()]
      words = re.findall(r"[=,{ ]%?([\w.-]+)", "\n".join(seen[name]))
      todo += [word for word in words if word in computations]
  return [line for _, lines in sorted(seen.items()) for line in lines]


def products(text, pattern):
  """How often products whose op_name has `pattern` run, by what it captured
  and their first dimension: Counter[(captured, rows)]."""
  program, counts = hlo.Program(text), collections.Counter()
  for outer, _, times in program.runs({"": math.nan}):
    for one in (outer, *program.inside(outer)):
      match = re.search(pattern, one.line)
      if one.op == "dot" and match:
        counts[match[1], one.buffers[0].shape[0]] += times
  return counts
