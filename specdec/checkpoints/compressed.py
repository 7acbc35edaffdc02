"""Safetensors in the layout of compressed-tensors (written as by its 0.20.0).

A matrix X.weight is int8 in `int-quantized`. In `pack-quantized` it is
X.weight_packed, int32 of eight numbers of four bits, from the lowest bits on,
each plus 8, and X.weight_shape. X.weight_scale is [out, groups] in both.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from specdec.checkpoints.hf_values import check_options
from specdec.models.quantization import Quantized
from specdec.models.weight_formats import BITS, WeightFormat
from specdec.utils.spelling import check_choice

VERSION = "0.20.0"  # of compressed-tensors, whose layout is written
KEY, PACKED = "quantization_config", "_packed"
METHOD, FP8 = "compressed-tensors", "fp8"
FLOAT8 = "float-quantized"  # a format that float8.py reads, and FP8
_BITS = {"int-quantized": 8, "pack-quantized": 4}
_SCALE, _SHAPE = "_scale", "_shape"


def check(config: Mapping[str, Any], source: str) -> None:
  """Raises ValueError where a config.json says what is not implemented."""
  scheme = config.get(KEY)
  if scheme is None:
    return
  scheme = scheme if isinstance(scheme, dict) else {}
  what, method = f"{source} is quantised by", scheme.get("quant_method")
  check_choice(what, method, (METHOD, FP8), "; accepted")
  form, forms = scheme.get("format"), (*_BITS, FLOAT8)
  check_choice(f"{source} has weights in", form, forms, "; accepted")
  for group, weights in groups(scheme, source):
    if group.get("input_activations"):
      raise ValueError(
        f"{source} quantises input_activations; accepted: weights alone"
      )
    check_options(
      weights,
      f"{source} is quantised and",
      type=("int", None),
      num_bits=(_BITS[form],),
      symmetric=(True, None),
      dynamic=(False, None),
      strategy=("channel", "group"),
      actorder=(None, False, "weight", "static"),
    )


def groups(
  scheme: Mapping[str, Any], source: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
  """Returns config_groups, each with its weights, as far as both are objects.

  Raises ValueError where what goes for all of them is not implemented.
  """
  found = scheme.get("config_groups")
  if not (isinstance(found, dict) and found):
    raise ValueError(f"{source} has no config_groups in {KEY}")
  for name in ("kv_cache_scheme", "transform_config"):
    if scheme.get(name):
      raise ValueError(f"{source} has {name}; accepted: null")
  sparsity = scheme.get("sparsity_config") or {}
  pattern = sparsity.get("format", "dense")
  check_choice(f"{source} has sparsity", pattern, ("dense",), "; accepted")
  pairs = []
  for group in found.values():
    group = group if isinstance(group, dict) else {}
    weights = group.get("weights")
    if group.get("output_activations"):
      raise ValueError(
        f"{source} quantises output_activations; accepted: weights alone"
      )
    pairs.append((group, weights if isinstance(weights, dict) else {}))
  return pairs


def logical(
  shapes: Mapping[str, tuple[int, ...]], scheme: Mapping[str, Any]
) -> tuple[dict[str, tuple[int, ...]], dict[str, WeightFormat]]:
  """Returns shapes of the matrices that tensors stand for, and their formats.

  Args:
    scheme: the quantization_config that goes with them, as `check` lets pass.

  Raises:
    ValueError: scales do not fit their matrix, or the scheme.
  """
  whole, formats = dict(shapes), {}
  weights = [group["weights"] for group in scheme["config_groups"].values()]
  sizes = {
    x.get("group_size") if x["strategy"] == "group" else None for x in weights
  }
  for name in [x for x in shapes if x.endswith(".weight" + _SCALE)]:
    base, scale = name.removesuffix(_SCALE), whole.pop(name)
    kind, shape = "int8", shapes.get(base, ())
    if base + PACKED in shapes:
      whole.pop(base + _SHAPE, None)
      *rows, columns = whole.pop(base + PACKED)
      kind, shape = "int4", (*rows, 8 * columns)
    if len(scale) != 2 or len(shape) != 2 or scale[0] != shape[0]:
      raise ValueError(f"{name} has shape {scale}, and {base} {shape}")
    if not scale[1] or shape[1] % scale[1]:
      raise ValueError(f"{name} has {scale[1]} groups of {shape[1]} inputs")
    group = shape[1] // scale[1]
    if group not in sizes and (None not in sizes or scale[1] > 1):
      raise ValueError(
        f"{name} has a scale for every {group} inputs, and config.json says "
        f"{' or '.join(str(x or 'one for all') for x in sizes)}"
      )
    whole[base] = shape
    formats[base] = WeightFormat(kind, group if group in sizes else None)
  return whole, formats


def unpack(packed: np.ndarray) -> np.ndarray:
  """Returns int4 [out, in] of int32 [out, in / 8]."""
  bits = np.arange(0, 32, 4, dtype=np.uint32)
  four = packed.view(np.uint32)[:, :, None] >> bits & 15
  four = four.astype(np.int8).reshape(len(packed), -1) - 8
  return four.astype(ml_dtypes.int4)


def arrays(name: str, weight: Quantized) -> dict[str, np.ndarray]:
  """Returns the tensors that hold the matrix `name` of a file.

  Raises:
    ValueError: the layout cannot say it.
  """
  if weight.offset is not None:
    raise ValueError(
      f"{name} has offsets that are no multiples of its scales, which "
      "compressed-tensors cannot hold; leave --weights=stored out"
    )
  values, scale = np.asarray(weight.values), np.asarray(weight.scale)
  held = {name + _SCALE: scale}
  if values.dtype == np.int8:
    return held | {name: values}
  if values.shape[1] % 8:
    raise ValueError(f"{name} has {values.shape[1]} inputs; 8 must divide them")
  four = (values.astype(np.int8) + 8).astype(np.uint32)
  four = four.reshape(len(values), -1, 8)
  packed = np.zeros(four.shape[:2], np.uint32)
  for i in range(8):
    packed |= four[:, :, i] << np.uint32(4 * i)
  shape = np.asarray(values.shape, np.int64)
  return held | {name + PACKED: packed.view(np.int32), name + _SHAPE: shape}


def scheme(formats: Mapping[str, WeightFormat | None]) -> dict[str, Any]:
  """Returns the quantization_config of modules by name.

  Args:
    formats: None for matrices that are not quantised.

  Raises:
    ValueError: they are quantised in several ways.
  """
  several = {form for form in formats.values() if form}
  if len(several) > 1:
    raise ValueError(
      f"matrices are held in {', '.join(sorted(map(str, several)))}; a file of "
      "compressed-tensors holds one kind: give it by --weights"
    )
  [form] = several
  bits = BITS[form.kind]
  weights = {
    "num_bits": bits,
    "type": "int",
    "symmetric": True,
    "strategy": "group" if form.group else "channel",
    "group_size": form.group,
    "dynamic": False,
  }
  layout = next(name for name, n in _BITS.items() if n == bits)
  return {
    "quant_method": METHOD,
    "version": VERSION,
    "format": layout,
    "quantization_status": "compressed",
    "config_groups": {
      "group_0": {"targets": ["Linear", "Embedding"], "weights": weights}
    },
    "ignore": [name for name, form in formats.items() if form is None],
  }
