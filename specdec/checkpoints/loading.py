"""Loads any supported checkpoint: config, parameters and tokenizer.

Invariant: names and shapes are checked before the first weight is read, and at
most one tensor exists twice at any time.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from specdec import sharding
from specdec.checkpoints import (
  gguf,
  gguf_tokenizer,
  hub,
  huggingface,
  names,
  orbax_layout,
  tokenizer,
)
from specdec.models import layouts, transformer
from specdec.models import params as model_params
from specdec.models.config import DTYPES, TransformerConfig
from specdec.utils.spelling import check_choice


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A loaded model."""

  config: TransformerConfig  # its dtype is that of the parameters
  params: dict[str, Any]  # of the Flax module; matrices are [out, in]
  tokenizer: tokenizer.Tokenizer | None
  eos_ids: tuple[int, ...]  # tokens that end a text
  source: str  # path or hub name that it was loaded from

  def packed(self) -> "Checkpoint":
    """Returns a checkpoint for decoding only, with weights packed for speed.

    Consumes this checkpoint's parameters; see `layouts.pack`.
    """
    return dataclasses.replace(self, params=layouts.pack(self.params))


def inspect(source: str | Path, dtype: str = "float32") -> TransformerConfig:
  """Reads only the config; arguments and errors as for `load`."""
  check_choice("dtype", dtype, DTYPES)
  path = hub.resolve(source, hub.CONFIG_FILES)
  if path.is_file():
    return gguf.config(gguf.Weights(path), dtype)
  return huggingface.config(path, dtype)


def load(
  source: str | Path,
  dtype: str = "float32",
  place: sharding.Placement | None = None,
) -> Checkpoint:
  """Loads a checkpoint onto JAX's default device, or onto a mesh.

  Args:
    source: a directory with config.json and safetensors or orbax/, a .gguf
      file, a directory with one .gguf file, or a hub name like 'owner/name'.
    dtype: 'float32' or 'bfloat16', of the parameters.
    place: placement on a mesh; None for one device. Each host reads only its
      shards of safetensors and Orbax checkpoints, but every tensor of GGUF
      files, one at a time.

  Raises:
    FileNotFoundError: the source, or one of its files, is absent.
    ValueError: the architecture or an option is not implemented, a tensor is
      missing, unexpected, of the wrong shape or not finite, a file is damaged,
      or weights are pickled.
  """
  check_choice("dtype", dtype, DTYPES)
  path = hub.resolve(source)
  if path.is_file():
    weights = gguf.Weights(path)
    config = gguf.config(weights, dtype)
    text = gguf_tokenizer.from_gguf(weights, limit=config.vocab_size)
    eos_ids = text.eos_ids if text else ()
    entries = [((tensor.gguf,), tensor) for tensor in names.tensors(config)]
    params = _read(weights, entries, dtype, place)
  else:
    config = huggingface.config(path, dtype)
    text = tokenizer.from_directory(path, limit=config.vocab_size)
    # Without a tokenizer only end tokens given by id are usable.
    eos_ids = (
      text.eos_ids
      if text
      else tuple(t for t in huggingface.eos_tokens(path) if isinstance(t, int))
    )
    if orbax_layout.has_weights(path):
      shardings = place and model_params.shardings(config, place)
      params = orbax_layout.read(path, config, dtype, shardings)
    else:
      entries = [(t.hugging_face, t) for t in names.tensors(config)]
      params = _read(huggingface.Weights(path), entries, dtype, place)
  check_finite(params, source)
  return Checkpoint(config, params, text, eos_ids, str(source))


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x))


def check_finite(params: dict[str, Any], source: str | Path) -> None:
  """Raises ValueError that names the first tensor with NaN or infinity."""
  flat = traverse_util.flatten_dict(params, sep=".")
  finite = {name: _is_finite(x) for name, x in flat.items()}
  bad = [name for name, is_finite in finite.items() if not is_finite]
  if bad:
    more = f" and {len(bad) - 1} more tensors" if bad[1:] else ""
    raise ValueError(f"{source}: {bad[0]}{more} hold NaN or infinite weights")


def random_checkpoint(
  config: TransformerConfig,
  seed: int = 0,
  source: str = "random",
  place: sharding.Placement | None = None,
) -> Checkpoint:
  """Returns a checkpoint with random weights and no tokenizer."""
  key = jax.random.key(seed)
  init = functools.partial(transformer.init_params, config)
  if place is not None:
    init = jax.jit(init, out_shardings=model_params.shardings(config, place))
  return Checkpoint(config, init(key), None, (), source)


def load_tokenizer(source: str | Path) -> tokenizer.Tokenizer:
  """Loads only the tokenizer of a checkpoint.

  The source may also be a directory with just a tokenizer.

  Raises:
    FileNotFoundError: the source is absent or has no tokenizer.
    ValueError: its tokenizer is damaged or of a kind that is not implemented.
  """
  path = Path(source).expanduser()
  if not (path / "tokenizer.json").is_file():
    path = hub.resolve(source, ("*.json", "*.jinja"))
  if path.is_file():
    text = gguf_tokenizer.from_gguf(gguf.Weights(path))
  else:
    text = tokenizer.from_directory(path)
  if text is None:
    raise FileNotFoundError(f"{source} has no tokenizer")
  return text


def _read(weights, entries, dtype: str, place) -> dict[str, Any]:
  """Reads the parameters, given as pairs (names in the file, Tensor)."""
  names.check(
    {
      name: tensor.shape[1:] if len(parts) > 1 else tensor.shape
      for parts, tensor in entries
      for name in parts
    },
    weights.shapes,
    weights.source,
  )

  def read(parts, tensor: names.Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a slice of a tensor stored in one part, or one per expert."""
    if len(parts) == 1:
      return weights.read(parts[0], tensor, index)
    experts, rest = parts[index[0]], index[1:]
    return np.stack([weights.read(part, tensor, rest) for part in experts])

  def load_tensor(parts, tensor: names.Tensor) -> jax.Array:
    # Copies, because JAX on CPU may alias the memory-mapped file otherwise.
    if place is None:
      everything = (slice(None),) * len(tensor.shape)
      array = read(parts, tensor, everything)
      return jnp.array(array.astype(jnp.dtype(dtype), copy=False), copy=True)
    shards = {}  # devices with the same shard share one read

    def shard(index: tuple[slice, ...]) -> np.ndarray:
      if str(index) not in shards:
        array = read(parts, tensor, index)
        shards[str(index)] = np.array(array, jnp.dtype(dtype))
      return shards[str(index)]

    sharding_ = place.sharding(tensor.axes, tensor.path, tensor.shape)
    return jax.make_array_from_callback(tensor.shape, sharding_, shard)

  return traverse_util.unflatten_dict(
    {tensor.path: load_tensor(parts, tensor) for parts, tensor in entries},
    sep="/",
  )
