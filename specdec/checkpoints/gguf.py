"""Reads config and weights from GGUF files, the container of llama.cpp.

Weights are dequantised one at a time from the memory-mapped file. Invariant:
`Weights.read` returns tensors as Hugging Face stores them; llama.cpp's order of
query and key rows stays inside this module.
"""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, GGUFValueType, quants

from specdec.checkpoints.names import Tensor
from specdec.models.config import (
  GEMMA,
  OLMO2,
  TransformerConfig,
  check_limits,
)
from specdec.models.quantization import Quantized
from specdec.models.rope_scaling import RopeScaling
from specdec.models.rotary import rope_frequencies
from specdec.models.weight_formats import WeightFormat
from specdec.utils.spelling import check_choice, naming

# Fields of TransformerConfig in which each architecture differs from Llama.
ARCHITECTURES = {
  "llama": {},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "qwen3moe": {"qk_norm": True},
  "gemma2": GEMMA,
  "gemma3": GEMMA | {"qk_norm": True},
  "smollm3": {},
  "olmo2": OLMO2,
}
_PERMUTED = "llama", "smollm3"  # whose rows of queries and keys are reordered
_PATTERN = {"gemma2": 2, "gemma3": 6}  # every n-th layer has full attention


# Types whose blocks are a float16 scale, in the last an offset, and integers.
_KEPT = {
  "Q8_0": WeightFormat("int8", 32),
  "Q4_0": WeightFormat("int4", 32),
  "Q4_1": WeightFormat("uint4", 32),
}
# Far above any real file, and still few enough to loop over.
_MAX_TENSORS, _MAX_STRINGS = 2**17, 2**24


class _Reader(GGUFReader):
  """Reads arrays in one piece; item by item, 262144 tokens take 20 s."""

  def _build_tensor_info(self, offs, count):
    if count > _MAX_TENSORS:
      raise ValueError(f"its header claims {count:,} tensors")
    return super()._build_tensor_info(offs, count)

  def _get_field_parts(self, orig_offs, raw_type):
    if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
      return super()._get_field_parts(orig_offs, raw_type)
    header = [
      self._get(orig_offs, np.uint32),
      self._get(orig_offs + 4, np.uint64),
    ]
    item, count = GGUFValueType(int(header[0][0])), int(header[1][0])
    types, offset = [GGUFValueType.ARRAY, item], orig_offs + 12
    if item in self.gguf_scalar_to_np:
      values = self._get(offset, self.gguf_scalar_to_np[item], count)
      if values.size < count:
        raise ValueError("it ends inside an array")
      return 12 + values.nbytes, [*header, values], [2], types
    if item != GGUFValueType.STRING or count > _MAX_STRINGS:
      raise ValueError(f"it holds an array of {count:,} of {item.name}")
    file, strings = memoryview(self.data), []
    for _ in range(count):
      start = offset + 8
      offset = start + int.from_bytes(file[offset:start], sys.byteorder)
      if offset > len(file):
        raise ValueError("it ends inside an array")
      strings.append(file[start:offset])
    parts = [*header, *strings]
    return offset - orig_offs, parts, list(range(2, len(parts))), types


class Weights:
  """Tensors and metadata of a GGUF file."""

  def __init__(self, path: Path):
    """Reads the index; raises ValueError if the file is damaged."""
    try:
      reader = _Reader(path)
    # The reader does not validate: a damaged field can raise anything.
    except Exception as error:
      raise ValueError(
        f"{path} is not a complete GGUF file: "
        f"{str(error) or type(error).__name__}"
      ) from error
    self.source = str(path)
    self._fields = reader.fields
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}
    # Its value begins the model's other keys.
    self.architecture = self.get("general.architecture")
    self.formats = {  # of matrices that can be held as they are stored
      name: _KEPT[tensor.tensor_type.name]
      for name, tensor in self._tensors.items()
      if tensor.tensor_type.name in _KEPT and len(tensor.shape) == 2
    }
    self._last: tuple = (None, None)  # (name, spec), array: cache of `read`

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by GGUF name, slowest axis first."""
    return {
      name: tuple(int(size) for size in reversed(tensor.shape))
      for name, tensor in self._tensors.items()
    }

  def read(
    self,
    name: str,
    spec: Tensor | None = None,
    index: tuple[slice, ...] = (),
  ) -> np.ndarray:
    """Reads a tensor, or a slice of it, as float32.

    With `spec`, llama.cpp's row order and norm offset are undone. Raises
    ValueError where the gguf package cannot dequantise its type.
    """
    # Slices are read in turn: their tensor is dequantised once.
    if self._last[0] != (name, spec):
      self._last = (name, spec), self._read(name, spec)
    return self._last[1][index]

  def integers(self, name: str, spec: Tensor) -> Quantized:
    """Returns a matrix of `formats` as it is stored, its scales as float32."""
    (rows, columns), form = self.shapes[name], self.formats[name]
    raw = np.ascontiguousarray(self._tensors[name].data).view(np.uint8)
    blocks = raw.reshape(rows, columns // form.group, -1)
    bounds = 2 + 2 * form.has_offset
    halves = np.ascontiguousarray(blocks[..., :bounds]).view(np.float16)
    scales = halves.astype(np.float32)
    stored = blocks[..., bounds:]
    if form.kind == "int8":
      values = stored.view(np.int8)
    else:
      values = np.concatenate([stored & 15, stored >> 4], axis=-1)
      if form.kind == "int4":
        values = values.view(np.int8) - 8
      values = values.astype(jnp.dtype(form.kind))
    parts = [values.reshape(rows, -1), scales[..., 0]]
    if form.has_offset:
      parts.append(scales[..., 1])
    if spec.permuted_heads and self.architecture in _PERMUTED:
      parts = [unpermute(part, spec.permuted_heads) for part in parts]
    return Quantized(*parts)

  def _read(self, name: str, spec: Tensor | None) -> np.ndarray:
    tensor = self._tensors[name]
    try:
      array = quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
      raise ValueError(
        f"{name} in {self.source} is stored as {tensor.tensor_type.name}, "
        "which the gguf package cannot dequantise"
      ) from error
    if spec is None:
      return array
    if spec.permuted_heads and self.architecture in _PERMUTED:
      array = unpermute(array, spec.permuted_heads)
    return array - np.float32(spec.gguf_offset) if spec.gguf_offset else array

  def get(self, key: str, default: Any = None) -> Any:
    """Returns a metadata value; raises ValueError if it is not UTF-8."""
    field = self._fields.get(key)
    try:
      return default if field is None else field.contents()
    except UnicodeDecodeError as error:
      raise ValueError(f"{self.source} has a damaged {key}: {error}") from error

  def option(self, key: str, default: Any = None) -> Any:
    """Returns the architecture's value of a key; raises as `get`."""
    return self.get(f"{self.architecture}.{key}", default)

  def number(self, key: str, default: Any = None) -> Any:
    """Returns an option; raises ValueError unless it is below 1e38."""
    value = self.option(key, default)
    # Written so that NaN fails the comparison.
    if type(value) not in (int, float) or not abs(value) < 1e38:
      raise ValueError(
        f"{self.source} has {self.architecture}.{key} = {value!r:.60}; it must "
        "be a number below 1e38"
      )
    return value

  def count(self, key: str, default: Any = None) -> int:
    """Returns an option; raises as `number`, and unless it is an integer."""
    value = self.number(key, default)
    if type(value) is not int:
      raise ValueError(
        f"{self.source} has {self.architecture}.{key} = {value!r}; it must be "
        "an integer"
      )
    return value


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
  """Reorders rows [heads, dim/2, 2] to [heads, 2, dim/2].

  llama.cpp rotates pairs (2i, 2i+1) and Hugging Face pairs (i, i + dim/2).
  """
  rows = weight.shape[0]
  pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
  return pairs.swapaxes(1, 2).reshape(weight.shape)


def config(weights: Weights, dtype: str) -> TransformerConfig:
  """Parses the metadata of a file, to load the weights in `dtype`.

  Raises ValueError where the architecture or an option is not implemented, or a
  size is missing.
  """
  source, architecture = weights.source, weights.architecture
  what = f"{source} is of GGUF architecture"
  check_choice(what, architecture, ARCHITECTURES, "; accepted")
  number, count = weights.number, weights.count
  experts = count("expert_count", 0)
  # Only llama.cpp's behaviour for absent keys is implemented.
  for key, accepted in (
    ("attention.scale", 0.0),
    ("expert_shared_count", 0),
    ("expert_gating_func", 1),
    ("expert_weights_norm", True),
  ):
    if weights.option(key, accepted) != accepted:
      raise ValueError(f"{source} has {architecture}.{key}, not implemented")
  heads, width = count("attention.head_count"), count("embedding_length")
  head_dim = count("attention.key_length", width // max(heads, 1))
  for key in ("attention.value_length", "rope.dimension_count"):
    if count(key, head_dim) != head_dim:
      raise ValueError(
        f"{source} has {architecture}.{key} = {count(key)}; accepted: "
        f"{head_dim}, the key length"
      )
  layers, theta = count("block_count"), number("rope.freq_base", 10_000.0)
  shapes = weights.shapes
  if len(shapes.get("token_embd.weight", ())) != 2:
    raise ValueError(f"{source} lacks the matrix token_embd.weight")
  with naming(source):
    check_limits(layers, experts)
    return TransformerConfig(
      vocab_size=shapes["token_embd.weight"][0],
      num_layers=layers,
      width=width,
      mlp_width=count(
        "expert_feed_forward_length" if experts else "feed_forward_length",
        count("feed_forward_length", 0) or None,
      ),
      num_heads=heads,
      num_kv_heads=count("attention.head_count_kv", heads),
      head_dim=head_dim,
      norm_epsilon=_shortest(number("attention.layer_norm_rms_epsilon")),
      rope_theta=_shortest(theta),
      rope_scaling=_rope_scaling(weights, theta, head_dim),
      tied="output.weight" not in shapes,
      windows=_windows(weights, layers),
      num_experts=experts,
      experts_per_token=count("expert_used_count") if experts else 0,
      **ARCHITECTURES[architecture],
      # llama.cpp has every fourth without rotation, whatever the file says.
      unrotated_layers=tuple(range(3, layers, 4))
      if architecture == "smollm3"
      else (),
      **_gemma(weights, layers, theta, width // max(heads, 1), head_dim),
      dtype=dtype,
    )


def _windows(weights: Weights, layers: int) -> tuple[int | None, ...]:
  architecture = weights.architecture
  window = weights.count(
    "attention.sliding_window", 4096 if architecture == "gemma2" else 0
  )
  if not window:
    return ()
  if architecture == "llama":
    return (window,) * layers
  if architecture not in _PATTERN:
    raise ValueError(
      f"{weights.source} has {architecture}.attention.sliding_window = "
      f"{window} without specifying its layers"
    )
  key = "attention.sliding_window_pattern"
  sliding = weights.option(key)
  if not isinstance(sliding, list):  # a period, not one flag per layer
    every = max(weights.count(key, _PATTERN[architecture]), 1)
    sliding = [(layer + 1) % every > 0 for layer in range(layers)]
  if len(sliding) != layers:
    raise ValueError(
      f"{weights.source} has {architecture}.{key} for {len(sliding)} of "
      f"{layers} layers"
    )
  return tuple(window if slides else None for slides in sliding)


def _gemma(
  weights: Weights, layers: int, theta: float, head_width: int, head_dim: int
) -> dict[str, float | None]:
  """Returns Gemma's fields, from metadata and llama.cpp's constants."""
  architecture, number = weights.architecture, weights.number
  if architecture not in _PATTERN:
    return {}
  large = layers == {"gemma2": 46, "gemma3": 62}[architecture]
  fields = {"query_scalar": head_width if large else head_dim}
  if architecture == "gemma2":
    if number("rope.freq_base_swa", theta) != theta:
      raise ValueError("gemma2.rope.freq_base_swa is not implemented")
    fields["attention_softcap"] = number("attn_logit_softcapping", 50.0)
    fields["logit_softcap"] = number("final_logit_softcapping", 30.0)
    return fields
  fields["logit_softcap"] = number("final_logit_softcapping", 0.0) or None
  if weights.count("attention.sliding_window", 0):
    theta = number("rope.freq_base_swa", 10_000.0)
    fields["local_rope_theta"] = _shortest(theta)
  return fields


def _shortest(value: float) -> float:
  """Returns the shortest decimal of a float32: 1e-5 for 9.99999975e-6."""
  return float(str(np.float32(value)))


def _rope_scaling(
  weights: Weights, theta: float, head_dim: int
) -> RopeScaling | None:
  kind = weights.option("rope.scaling.type", "none")
  if weights.option("rope.scaling.factor") is not None:
    factor = weights.number("rope.scaling.factor")
  else:  # files from before scaling.type
    factor = weights.number("rope.scale_linear", 1.0)
    kind = "linear" if factor != 1.0 and kind == "none" else kind
  if kind not in ("none", "linear"):
    raise ValueError(
      f"{weights.source} scales its rotary frequencies by {kind!r}; accepted: "
      "none, linear, and Llama 3's factors in rope_freqs.weight"
    )
  linear = None
  if kind == "linear" and factor != 1.0:
    linear = RopeScaling("linear", _shortest(factor))
  if "rope_freqs.weight" not in weights.shapes:
    return linear
  divisors = weights.read("rope_freqs.weight")
  if np.all(divisors == 1):
    return linear
  scaling = RopeScaling("llama3", _shortest(float(divisors.max())))
  if (
    linear is not None
    or divisors.shape != (head_dim // 2,)
    or not np.allclose(
      divisors, llama3_divisors(scaling, theta, head_dim), rtol=1e-4
    )
  ):
    raise ValueError(
      f"rope_freqs.weight in {weights.source} stretches the rotary frequencies "
      f"by factors up to {divisors.max():g} that are not Llama 3's (between "
      f"{scaling.original_length} / 4 and {scaling.original_length} positions)"
    )
  return scaling


def llama3_divisors(
  scaling: RopeScaling, theta: float, head_dim: int
) -> np.ndarray:
  """Returns the divisor of each rotary frequency, [head_dim / 2]."""
  unscaled = rope_frequencies(theta, head_dim, None)
  return np.asarray(unscaled / rope_frequencies(theta, head_dim, scaling))
