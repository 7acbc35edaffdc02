"""Matrices of GPT-OSS's experts in MXFP4, dequantised when read.

A tensor X is X_blocks [E, out, in / 32, 16], two numbers a byte, the first in
the low bits, and X_scales [E, out, in / 32], bytes s that stand for 2^(s - 127)
(OCP Microscaling Formats 1.0). Numbers that bfloat16 reaches are exact in it.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

METHOD, STORED = "mxfp4", "U8"
BLOCKS, SCALES = "_blocks", "_scales"
_NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
_NUMBERS = _NUMBERS.astype(ml_dtypes.bfloat16)


def applies(scheme: Any) -> bool:
  """Whether a quantization_config is of MXFP4."""
  return isinstance(scheme, dict) and scheme.get("quant_method") == METHOD


def logical(
  shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
  """Returns shapes [E, in, out], as others store them, and which are MXFP4.

  Raises:
    ValueError: scales do not fit their blocks.
  """
  whole, packed = dict(shapes), set()
  for blocks in [x for x in shapes if x.endswith(BLOCKS)]:
    name = blocks.removesuffix(BLOCKS)
    shape, scales = whole.pop(blocks), whole.pop(name + SCALES, None)
    if len(shape) != 4 or shape[3] != 16 or scales != shape[:3]:
      raise ValueError(f"{blocks} has shape {shape}, and its scales {scales}")
    whole[name] = shape[0], 32 * shape[2], shape[1]
    packed.add(name)
  return whole, packed


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns numbers [..., in] in bfloat16.

  Args:
    blocks: [..., in / 32, 16] bytes.
    scales: [..., in / 32] bytes.
  """
  numbers = np.stack([_NUMBERS[blocks & 15], _NUMBERS[blocks >> 4]], axis=-1)
  scale = scales.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)
  numbers *= scale[..., None, None]
  return numbers.reshape(*blocks.shape[:-2], -1)
