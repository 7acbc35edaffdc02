"""Any checkpoint to the decoder's config, parameters and tokenizer.

Invariant: names and shapes are checked before the first weight is read, and at
any time at most one tensor exists twice.
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
from specdec.models.config import TransformerConfig

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model, ready to run.

  Attributes:
    config: shape of the decoder; its dtype is that of the parameters.
    params: nested dict of arrays, as the decoder's Flax module lays them out;
      matrices are [out, in].
    tokenizer: None where the checkpoint brings none.
    eos_ids: tokens that end a text, in the checkpoint's order.
    source: where it came from.
  """

  config: TransformerConfig
  params: dict[str, Any]
  tokenizer: tokenizer.Tokenizer | None
  eos_ids: tuple[int, ...]
  source: str

  def packed(self) -> "Checkpoint":
    """The same for decoding alone, its weights as this backend likes them.

    Takes the weights out of this one.
    """
    return dataclasses.replace(self, params=layouts.pack(self.params))


def inspect(source: str | Path, dtype: str = "float32") -> TransformerConfig:
  """The config alone, before any weight is read; arguments as of `load`.

  Its `num_parameters` and `dtype` say how much memory `load` will take.
  """
  _check_dtype(dtype)
  path = hub.resolve(source, hub.CONFIG_FILES)
  if path.is_file():
    return gguf.config(gguf.Weights(path), dtype)
  return huggingface.config(path, dtype)


def load(
  source: str | Path,
  dtype: str = "float32",
  place: sharding.Placement | None = None,
) -> Checkpoint:
  """Loads a checkpoint onto JAX's default device, or a mesh.

  Args:
    source: a directory with config.json and safetensors or orbax/, a .gguf
      file, a directory with one .gguf file, or a hub name like 'owner/name'.
    dtype: 'float32' or 'bfloat16', of the parameters.
    place: where its parts go. Every host reads its own parts of safetensors
      and of Orbax; of GGUF it reads all, tensor by tensor.

  Raises:
    FileNotFoundError: the source, or a file it should have, is absent.
    ValueError: the architecture or an option is not implemented, a tensor is
      missing, unknown, misshapen or not finite, a file is damaged, or weights
      are pickled.
  """
  _check_dtype(dtype)
  path = hub.resolve(source)
  if path.is_file():
    weights = gguf.Weights(path)
    config = gguf.config(weights, dtype)
    wanted = [((tensor.gguf,), tensor) for tensor in names.tensors(config)]
    text = gguf_tokenizer.from_gguf(weights, limit=config.vocab_size)
    eos_ids = text.eos_ids if text else ()
  else:
    config = huggingface.config(path, dtype)
    text = tokenizer.from_directory(path, limit=config.vocab_size)
    # Without a tokenizer an end token's string says nothing, but its id does.
    eos_ids = (
      text.eos_ids
      if text
      else tuple(t for t in huggingface.eos_tokens(path) if isinstance(t, int))
    )
    if orbax_layout.has_weights(path):
      params = orbax_layout.read(
        path, config, dtype, place and model_params.shardings(config, place)
      )
      check_finite(params, source)
      return Checkpoint(config, params, text, eos_ids, str(source))
    weights = huggingface.Weights(path)
    wanted = [(t.hugging_face, t) for t in names.tensors(config)]
  params = _read(weights, wanted, dtype, place)
  check_finite(params, source)
  return Checkpoint(config, params, text, eos_ids, str(source))


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x))


def check_finite(params: dict[str, Any], source: str | Path) -> None:
  """Refuses weights that are NaN or infinite, by name.

  Raises:
    ValueError: names the first of them.
  """
  flat = traverse_util.flatten_dict(params, sep=".")
  sound = {name: _is_finite(x) for name, x in flat.items()}
  broken = [name for name, finite in sound.items() if not finite]
  if broken:
    more = f" and {len(broken) - 1} more tensors" if broken[1:] else ""
    raise ValueError(
      f"{source}: {broken[0]}{more} hold NaN or infinite weights"
    )


def random_checkpoint(
  config: TransformerConfig,
  seed: int = 0,
  source: str = "random",
  place: sharding.Placement | None = None,
) -> Checkpoint:
  """A checkpoint of this shape with random weights and no tokenizer."""
  key = jax.random.key(seed)
  if place is None:
    params = transformer.init_params(config, key)
  else:
    init = functools.partial(transformer.init_params, config)
    params = jax.jit(init, out_shardings=model_params.shardings(config, place))(
      key
    )
  return Checkpoint(config, params, None, (), source)


def load_tokenizer(source: str | Path) -> tokenizer.Tokenizer:
  """The tokenizer alone; `source` as of `load`, or a tokenizer's directory.

  Raises:
    FileNotFoundError: the source is absent or brings no tokenizer.
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
    raise FileNotFoundError(f"{source} brings no tokenizer")
  return text


def _check_dtype(dtype: str) -> None:
  if dtype not in DTYPES:
    raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")


def _read(weights, wanted, dtype: str, place) -> dict[str, Any]:
  names.check(
    {
      name: tensor.part_shape if len(parts) > 1 else tensor.shape
      for parts, tensor in wanted
      for name in parts
    },
    weights.shapes,
    weights.source,
  )

  def deployment(parts, tensor: names.Tensor) -> jax.Array:
    if place is None:
      whole = (slice(None),) * len(tensor.shape)
      return _to_device(_slice(weights, parts, tensor, whole, dtype), dtype)
    read = {}  # devices that hold the same part share what was read

    def part(index: tuple[slice, ...]) -> np.ndarray:
      key = str(index)
      if key not in read:
        found = _slice(weights, parts, tensor, index, dtype)
        read[key] = np.array(found, jnp.dtype(dtype))
      return read[key]

    where = place.sharding(tensor.axes, tensor.path, tensor.shape)
    return jax.make_array_from_callback(tensor.shape, where, part)

  return traverse_util.unflatten_dict(
    {tensor.path: deployment(parts, tensor) for parts, tensor in wanted},
    sep="/",
  )


def _slice(
  weights,
  parts: tuple[str, ...],
  tensor: names.Tensor,
  index: tuple[slice, ...],
  dtype: str,
) -> np.ndarray:
  """A slice of a tensor that a file holds whole, or expert by expert."""
  if len(parts) == 1:
    return weights.read(parts[0], tensor, index)
  first, *rest = index
  some = [weights.read(part, tensor, tuple(rest)) for part in parts[first]]
  return np.stack(some).astype(jnp.dtype(dtype), copy=False)


def _to_device(array: np.ndarray, dtype: str) -> jax.Array:
  # A copy of its own: on CPU JAX may otherwise keep a view of the mapped file,
  # which would change with it.
  return jnp.array(array.astype(jnp.dtype(dtype), copy=False), copy=True)
