"""Counts the FLOPs of a compiled program's products, in loops as often as they
run: XLA's own cost analysis counts the body of a loop once."""

import math
import re
from collections.abc import Mapping

import numpy as np

from specdec.compiled import hlo


def flops(
  program: hlo.Program, unknown: Mapping[str, float] = hlo.NO_COUNTS
) -> float:
  """Returns twice the multiply-adds of all dots and convolutions.

  Args:
    unknown: as of hlo.Program.runs.
  """

  def of(one: hlo.Instruction, around: Mapping[str, hlo.Instruction]) -> float:
    if one.op == "fusion":
      inside = program.called(one)
      return sum(of(x, inside) for x in inside.values())
    if one.op not in ("dot", "convolution"):
      return 0.0
    left, right = (around[name].buffers[0].shape for name in one.operands[:2])
    dot = one.op == "dot"
    return 2.0 * (_dot(one, left) if dot else _convolution(one, left, right))

  return sum(times * of(*one) for *one, times in program.runs(unknown))


def _dot(one: hlo.Instruction, left: tuple) -> int:
  """Returns the multiply-adds of a dot."""
  [dims] = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", one.line)
  summed = math.prod(left[int(i)] for i in dims.split(",") if i)
  return math.prod(one.buffers[0].shape) * summed


def _convolution(one: hlo.Instruction, left: tuple, right: tuple) -> int:
  """Returns the multiply-adds of a convolution, padding left out; a TPU
  computes dots so, with batches as windows."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.line)
  of_left, of_right, of_result = labels.groups()
  result = one.buffers[0].shape
  window = re.search(r"window=\{([^}]*)\}", one.line)
  options = dict(re.findall(r"(\w+)=([\dx_-]+)", window[1] if window else ""))

  def option(name: str, place: int, default: int) -> int:
    values = options.get(name, "").split("x")
    return int(values[place].split("_")[0]) if values[0] else default

  count = math.prod(result[of_result.index(x)] for x in "bf")
  count *= right[of_right.index("i")]
  for label in filter(str.isdigit, sorted(of_result)):
    place = int(label)
    count *= _pairs(
      left[of_left.index(label)],
      right[of_right.index(label)],
      result[of_result.index(label)],
      stride=option("stride", place, 1),
      padding=option("pad", place, 0),
      spread=option("lhs_dilate", place, 1),
      step=option("rhs_dilate", place, 1),
    )
  return count


def _pairs(
  size: int,
  kernel: int,
  results: int,
  *,
  stride: int,
  padding: int,
  spread: int,
  step: int,
) -> int:
  """Returns how many entries of the input all windows of a dimension meet.

  Args:
    size, kernel, results: of the input, the window and the result.
    stride: between windows.
    padding: in front of the input.
    spread: distance of the input's entries, with zeros between them.
    step: distance of a window's entries.
  """
  places = stride * np.arange(results)[:, None] + step * np.arange(kernel)
  places -= padding
  meets = (places >= 0) & (places <= (size - 1) * spread)
  return int(np.sum(meets & (places % spread == 0)))
