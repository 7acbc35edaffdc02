"""Tokenizers, and GGUF files as llama.cpp's converter writes them."""

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType as Kind
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.checkpoints import names
from specdec.models.config import TransformerConfig

CONFIG = TransformerConfig(
  vocab_size=32,
  num_layers=2,
  width=64,
  mlp_width=96,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
)


def random_params(config=CONFIG):
  rng = np.random.default_rng(0)
  return {
    tensor.path: rng.normal(size=tensor.shape).astype(np.float32)
    for tensor in names.tensors(config)
  }


def byte_level(specials, *splitters):
  """Trains a small byte-level BPE whose ids begin with the special tokens."""
  inner = tokenizers.Tokenizer(models.BPE())
  bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.pre_tokenizer = pre_tokenizers.Sequence([*splitters, bytes_])
  inner.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=290,
    special_tokens=list(specials),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  inner.train_from_iterator(["the cat and the hat that sat 12 " * 9], trainer)
  return inner


def permute(weight, heads):
  """Halves to neighbouring pairs, as llama.cpp's converter reorders rows."""
  rows, columns = weight.shape
  halves = weight.reshape(heads, 2, rows // heads // 2, columns)
  return halves.swapaxes(1, 2).reshape(rows, columns)


def write(path, params=None, config=CONFIG, kind=Kind.F32, change=None, **keys):
  """A tiny GGUF as llama.cpp's converter writes them.

  `arch` is of llama unless given, `keys` replace metadata (None: left out) and
  `change(writer)` adds to it.
  """
  params = random_params(config) if params is None else params
  arch = keys.pop("arch", "llama")
  writer = gguf.GGUFWriter(path, arch)
  metadata = {
    "block_count": config.num_layers,
    "embedding_length": config.width,
    "feed_forward_length": config.mlp_width,
    "attention.head_count": config.num_heads,
    "attention.head_count_kv": config.num_kv_heads,
    "rope.dimension_count": config.head_dim,
  } | keys
  for key, value in metadata.items():
    if isinstance(value, str):
      writer.add_string(f"{arch}.{key}", value)
    elif isinstance(value, float):
      writer.add_float32(f"{arch}.{key}", value)
    elif isinstance(value, list):
      writer.add_array(f"{arch}.{key}", value)
    elif value is not None:
      writer.add_uint32(f"{arch}.{key}", value)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  if change:
    change(writer)
  for tensor in names.tensors(config):
    array = params.get(tensor.path)
    if array is None:
      continue
    array = array + np.float32(tensor.gguf_offset)
    if tensor.permuted_heads and arch in ("llama", "smollm3"):
      array = permute(array, tensor.permuted_heads)
    if array.ndim == 2 and kind != Kind.F32:
      data = gguf.quants.quantize(array, kind)
      writer.add_tensor(tensor.gguf, data, raw_dtype=kind)
    else:
      writer.add_tensor(tensor.gguf, np.ascontiguousarray(array))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
