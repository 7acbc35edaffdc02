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
from specdec.models import layouts, quantization, transformer
from specdec.models import params as model_params
from specdec.models.config import DTYPES, TransformerConfig
from specdec.models.quantization import Quantized
from specdec.models.weight_formats import BITS, STORED, WeightFormat
from specdec.utils.spelling import check_choice


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A loaded model."""

  config: TransformerConfig  # says in which types the parameters are held
  params: dict[str, Any]  # of the Flax module; matrices are [out, in]
  tokenizer: tokenizer.Tokenizer | None
  eos_ids: tuple[int, ...]  # tokens that end a text
  source: str  # path or hub name that it was loaded from
  # Positions that it was trained on, where its config says so.
  trained_length: int | None = None

  def packed(self) -> "Checkpoint":
    """Returns a checkpoint for decoding only, with weights packed for speed.

    Consumes this checkpoint's parameters; see `layouts.pack`.
    """
    return dataclasses.replace(self, params=layouts.pack(self.params))


def inspect(
  source: str | Path,
  dtype: str = "float32",
  weights: WeightFormat | None = None,
) -> TransformerConfig:
  """Reads only the config; arguments and errors as for `load`."""
  check_choice("dtype", dtype, DTYPES)
  stored = weights is not None and weights.kind == STORED
  path = hub.resolve(source, hub.ALL_FILES if stored else hub.CONFIG_FILES)
  if path.is_file():
    reader = gguf.Weights(path)
    config = gguf.config(reader, dtype)
  else:
    _check_orbax(path, weights)
    config = huggingface.config(path, dtype)
    reader = huggingface.Weights(path) if stored else None
  return _with_formats(config, weights, reader)


def _check_orbax(path: Path, weights: WeightFormat | None) -> None:
  """Refuses to hold an Orbax checkpoint's matrices in another form."""
  if weights is not None and orbax_layout.has_weights(path):
    raise ValueError(
      f"weights = {weights}: {path} is an Orbax checkpoint, which is loaded in "
      "dtype; rewrite it as safetensors (convert)"
    )


def _with_formats(
  config: TransformerConfig, weights: WeightFormat | None, reader
) -> TransformerConfig:
  """Returns a config that says in which types its matrices are to be held."""
  held = weights
  if weights is not None and weights.kind == STORED:
    held = tuple(
      (tensor.path, reader.formats[parts[0]])
      for parts, tensor in _entries(reader, config)
      if len(parts) == 1 and parts[0] in reader.formats  # not of experts
    )
    if not held:
      raise ValueError(
        f"{reader.source} holds no matrix that can be kept as it is stored: "
        "Q8_0, Q4_0 or Q4_1 of GGUF, or compressed-tensors; give a type"
      )
  return dataclasses.replace(config, weights=held)


def _entries(
  reader, config: TransformerConfig
) -> list[tuple[tuple[str, ...], names.Tensor]]:
  """Returns pairs (names in the file, Tensor)."""
  in_gguf = isinstance(reader, gguf.Weights)
  return [
    ((tensor.gguf,) if in_gguf else tensor.hugging_face, tensor)
    for tensor in names.tensors(config)
  ]


def load(
  source: str | Path,
  dtype: str = "float32",
  place: sharding.Placement | None = None,
  weights: WeightFormat | None = None,
) -> Checkpoint:
  """Loads a checkpoint onto JAX's default device, or onto a mesh.

  Args:
    source: a directory with config.json and safetensors or orbax/, a .gguf
      file, a directory with one .gguf file, or a hub name like 'owner/name'.
    dtype: 'float32' or 'bfloat16', of the parameters.
    place: placement on a mesh; None for one device. Each host reads only its
      shards of safetensors and Orbax checkpoints, but every tensor of GGUF
      files, one at a time.
    weights: how matrices are held; None: in dtype. They are quantised one by
      one, as they are read.

  Raises:
    FileNotFoundError: the source, or one of its files, is absent.
    ValueError: the architecture or an option is not implemented, a tensor is
      missing, unexpected, of the wrong shape or not finite, a file is damaged,
      or weights are pickled.
  """
  check_choice("dtype", dtype, DTYPES)
  path, trained_length = hub.resolve(source), None
  if path.is_file():
    reader = gguf.Weights(path)
    config = _with_formats(gguf.config(reader, dtype), weights, reader)
    trained_length = reader.count("context_length", 0) or None
    text = gguf_tokenizer.from_gguf(reader, limit=config.vocab_size)
    eos_ids = text.eos_ids if text else ()
    params = _read(reader, config, place)
  else:
    config = huggingface.config(path, dtype)
    trained_length = huggingface.trained_length(path)
    text = tokenizer.from_directory(path, limit=config.vocab_size)
    # Without a tokenizer only end tokens given by id are usable.
    eos_ids = (
      text.eos_ids
      if text
      else tuple(t for t in huggingface.eos_tokens(path) if isinstance(t, int))
    )
    _check_orbax(path, weights)
    if orbax_layout.has_weights(path):
      shardings = place and model_params.shardings(config, place)
      params = orbax_layout.read(path, config, shardings)
    else:
      reader = huggingface.Weights(path)
      config = _with_formats(config, weights, reader)
      params = _read(reader, config, place)
  check_finite(params, source)
  return Checkpoint(config, params, text, eos_ids, str(source), trained_length)


@jax.jit
def _is_finite(x: jax.Array | Quantized) -> jax.Array:
  floats = [a for a in jax.tree.leaves(x) if jnp.issubdtype(a, jnp.floating)]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in floats]))


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
    drawn = dataclasses.replace(config, weights=None)
    init = jax.jit(init, out_shardings=model_params.shardings(drawn, place))
  flat = traverse_util.flatten_dict(init(key), sep="/")
  hold = _holder(config, place)
  params = {path: hold(path, flat.pop(path)) for path in list(flat)}
  params = traverse_util.unflatten_dict(params, sep="/")
  return Checkpoint(config, params, None, (), source)


def _holder(config: TransformerConfig, place: sharding.Placement | None):
  """Returns a function (path, array) -> the array as the config holds it."""
  flat: dict[str, Any] = {}
  if config.weights is not None and place is not None:
    tree = model_params.shardings(config, place)
    flat = traverse_util.flatten_dict(tree, sep="/")

  def hold(path: str, x: jax.Array) -> jax.Array | Quantized:
    form = config.format_of(path)
    if not form.is_integer:
      return x if x.dtype == form.kind else x.astype(form.kind)
    group = form.group or x.shape[1]
    quantize = _quantizer(group, BITS[form.kind], flat.get(path))
    # One at a time: what is queued would hold every matrix twice.
    return jax.block_until_ready(quantize(x))

  return hold


@functools.lru_cache
def _quantizer(group: int, bits: int, where: Quantized | None):
  quantize = functools.partial(quantization.quantize, group=group, bits=bits)
  return jax.jit(quantize, out_shardings=where)


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


def _read(weights, config: TransformerConfig, place) -> dict[str, Any]:
  """Reads the parameters, each as the config holds it."""
  entries, hold = _entries(weights, config), _holder(config, place)
  stored, sharded = isinstance(config.weights, tuple), {}
  if place is not None:
    tree = model_params.shardings(config, place)
    sharded = traverse_util.flatten_dict(tree, sep="/")
  model_params.held(config)  # refuses groups before anything is read
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

  def load_tensor(parts, tensor: names.Tensor) -> jax.Array | Quantized:
    form = config.format_of(tensor.path)
    if stored and form.is_integer:
      return load_integers(weights.integers(parts[0], tensor), tensor)
    # What is quantised here is read in full precision.
    dtype = "float32" if form.is_integer else form.kind
    return hold(tensor.path, load_floats(parts, tensor, dtype))

  def load_integers(matrix: Quantized, tensor: names.Tensor) -> Quantized:
    if place is None:
      return jax.tree.map(lambda x: jnp.array(x, copy=True), matrix)
    shardings = sharded[tensor.path]
    return jax.tree.map(
      lambda x, where: jax.make_array_from_callback(
        x.shape, where, lambda index: x[index]
      ),
      matrix,
      shardings,
    )

  def load_floats(parts, tensor: names.Tensor, dtype: str) -> jax.Array:
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
