"""Checkpoints whose matrices are eight-bit floats, dequantised when read.

A matrix X.weight is float8 e4m3. As DeepSeek and Qwen publish it (`fp8`), it
has X.weight_scale_inv with a scale for each block of 128 by 128, which
multiplies. In compressed-tensors (`float-quantized`) it has X.weight_scale, one
for the matrix, for each output or for each block. Activations, which engines
that compute in eight bits quantise as well, are left as they are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specdec.checkpoints import compressed
from specdec.checkpoints.hf_values import check_options
from specdec.utils.spelling import check_choice

STORED = "F8_E4M3"
_BLOCK = 128
_ENDS = ".weight_scale_inv", ".weight_scale"


def applies(scheme: Any) -> bool:
  """Whether a quantization_config is of eight-bit floats."""
  scheme = scheme if isinstance(scheme, dict) else {}
  method, form = scheme.get("quant_method"), scheme.get("format")
  return method == compressed.FP8 or form == compressed.FLOAT8


def check(scheme: Mapping[str, Any], source: str) -> None:
  """Raises ValueError where a quantization_config asks for something else."""
  what = f"{source} is quantised in float8 and"
  square = ([_BLOCK, _BLOCK],)
  if scheme.get("quant_method") == compressed.FP8:
    check_options(scheme, what, weight_block_size=square, fmt=("e4m3", None))
    return
  method = scheme.get("quant_method")
  known = compressed.METHOD, compressed.FP8
  check_choice(f"{source} is quantised by", method, known, "; accepted")
  for _, weights in compressed.groups(scheme, source):
    strategy = weights.get("strategy")
    check_options(
      weights,
      what,
      type=("float",),
      num_bits=(8,),
      symmetric=(True, None),
      dynamic=(False, None),
      strategy=("tensor", "channel", "block"),
      **({"block_structure": square} if strategy == "block" else {}),
    )


def logical(
  shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
  """Returns shapes of the matrices alone, and their names -> their scales'.

  Raises:
    ValueError: scales do not fit their matrix.
  """
  whole, scales = dict(shapes), {}
  for name in shapes:
    if name.endswith(".input_scale"):  # of activations
      del whole[name]
    for end in _ENDS:
      if name.endswith(end):
        scale, base = whole.pop(name), name.removesuffix(end) + ".weight"
        shape = shapes.get(base, ())
        if len(shape) != 2 or blocks(shape, scale) is None:
          raise ValueError(f"{name} has shape {scale}, and {base} {shape}")
        scales[base] = name
  return whole, scales


def blocks(
  shape: tuple[int, ...], scale: tuple[int, ...]
) -> tuple[int, int] | None:
  """Returns rows and columns that share a scale; None: scales do not fit."""
  if scale in ((), (1,), (1, 1)):
    return shape[0], shape[1]
  if scale in ((shape[0],), (shape[0], 1)):
    return 1, shape[1]
  if scale == tuple(-(-size // _BLOCK) for size in shape):
    return _BLOCK, _BLOCK
  return None


def dequantize(
  values: np.ndarray, scale: np.ndarray, index: tuple[slice, ...]
) -> np.ndarray:
  """Returns a part of a matrix as float32.

  Args:
    values: [out, in] float8; only the part is read.
    scale: as `blocks` lets pass.
    index: slices of rows and columns.
  """
  height, width = blocks(values.shape, scale.shape)
  rows, columns = (np.arange(n)[x] for n, x in zip(values.shape, index))
  scale = scale.astype(np.float32)
  scale = scale.reshape(-(-values.shape[0] // height), -1)
  scale = scale[rows // height][:, columns // width]
  return values[index].astype(np.float32) * scale


class Mapped:
  """float8 tensors of a safetensors file, which its reader for numpy lacks."""

  def __init__(self, path: Path):
    """Reads the index of a file that safetensors has opened before."""
    with path.open("rb") as file:
      size = int.from_bytes(file.read(8), "little")
      self._entries = json.loads(file.read(size))
    self._path, self.start = path, 8 + size

  def tensor(self, name: str) -> np.ndarray:
    """Returns a tensor that is read where it is indexed."""
    shape = self._entries[name]["shape"]
    start, _ = self._entries[name]["data_offsets"]
    raw = np.memmap(self._path, np.uint8, "r", self.start + start, tuple(shape))
    return raw.view(ml_dtypes.float8_e4m3fn)
