"""Reads and writes Hugging Face model directories with safetensors weights.

Invariant: nothing is unpickled; a directory with only pickled weights is
rejected.
"""

import dataclasses
import functools
import json
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec.checkpoints import (
  compressed,
  float8,
  hf_config,
  mxfp4,
  names,
  stored_names,
)
from specdec.models.config import TransformerConfig
from specdec.models.quantization import Quantized, dequantize
from specdec.utils import files, remote
from specdec.utils.spelling import naming

ORBAX = "orbax"  # folder of an Orbax checkpoint, next to config.json
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def trained_length(directory: Path) -> int | None:
  """Returns how many positions a config says the model is for."""
  content = read_json(directory / "config.json")
  nested = content.get("text_config")
  content = nested if isinstance(nested, dict) else content
  length = content.get("max_position_embeddings")
  return length if isinstance(length, int) else None


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
  """Reads a JSON object; returns {} if the file is absent and not required.

  Raises FileNotFoundError, or ValueError if it does not hold a JSON object.
  """
  if not path.is_file():
    if required:
      raise FileNotFoundError(f"{path} does not exist")
    return {}
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(content, dict):
    raise ValueError(f"{path} does not hold a JSON object")
  return content


def open_safetensors(path: Path, framework: str) -> safe_open:
  """Opens a safetensors file; raises ValueError if it is damaged."""
  try:
    return safe_open(path, framework=framework)
  except SafetensorError as error:
    raise ValueError(
      f"{path} is not a complete safetensors file: {error}"
    ) from error


def has_weights(directory: Path) -> bool:
  """Whether a directory holds safetensors weights."""
  return any((directory / name).is_file() for name in (INDEX, SINGLE))


def config(directory: Path, dtype: str) -> TransformerConfig:
  """Parses config.json; raises as `hf_config.parse`."""
  path = directory / "config.json"
  content = read_json(path, required=True)
  scheme = content.get(compressed.KEY)
  if float8.applies(scheme):
    float8.check(scheme, str(path))
  elif not mxfp4.applies(scheme):
    compressed.check(content, str(path))
  content.pop(compressed.KEY, None)
  has_head = None
  if hf_config.needs_weights(content):
    names_there = _names(directory)
    if names_there is not None:
      has_head = "lm_head.weight" in names_there
    elif (directory / ORBAX).is_dir():  # whose config is ours, and true
      has_head = not content.get("tie_word_embeddings", True)
  return hf_config.parse(content, str(path), dtype, has_head)


def _names(directory: Path) -> Collection[str] | None:
  """Returns the tensors that a directory holds or lists; None: unknown.

  An index says it where the weights themselves are not there.
  """
  if (directory / INDEX).is_file():
    return _weight_map(directory / INDEX)
  if (directory / SINGLE).is_file():
    return open_safetensors(directory / SINGLE, "numpy").keys()
  return None


def eos_tokens(directory: Path) -> tuple[int | str, ...]:
  """Returns the ids or texts that end a text, from the first file with any.

  The files are in the order of transformers' generation. Raises ValueError
  where an eos_token_id is not a valid id.
  """
  for name in ("generation_config.json", "config.json"):
    ids = read_json(directory / name).get("eos_token_id")
    if ids is not None:
      ids = ids if isinstance(ids, list) else [ids]
      bad = [i for i in ids if type(i) is not int or not 0 <= i < 2**31]
      if bad:
        raise ValueError(
          f"{directory / name} has eos_token_id = {bad[0]!r:.60}; it must be a "
          "token id or a list of token ids"
        )
      return tuple(ids)
  token = special_tokens(directory).get("eos_token")
  return () if token is None else (token,)


def special_tokens(directory: Path) -> dict[str, str]:
  """Returns name -> text of the special tokens in tokenizer_config.json."""
  path = directory / "tokenizer_config.json"
  special = {}
  for name, value in read_json(path).items():
    if name not in _SPECIAL or value is None:
      continue
    # Either the text, or an object with the text and options.
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
      raise ValueError(
        f"{path} has {name} = {value!r:.60}; it must be a string"
      )
    special[name] = text
  return special


class Weights:
  """Tensors of a directory by their Hugging Face names, read lazily.

  Raises FileNotFoundError for absent shards and ValueError for damaged files.
  """

  def __init__(self, directory: Path):
    self.source = str(directory)
    self._files, self._paths = {}, {}
    self._mapped = functools.cache(float8.Mapped)
    for path in shards(directory):
      file = open_safetensors(path, "numpy")
      self._files |= {name: file for name in file.keys()}  # noqa: SIM118
      self._paths |= {name: path for name in file.keys()}  # noqa: SIM118
    content = read_json(directory / "config.json")
    self._stored = stored_names.text_names(  # name -> that in the file
      stored_names.without_mtp(self._files, content),
      hf_config.architectures(content),
    )
    shapes = {
      name: tuple(self._files[stored].get_slice(stored).get_shape())
      for name, stored in self._stored.items()
    }
    self.shapes, self.formats = shapes, {}  # of matrices, quantised or not
    self._scales = {}  # of matrices in float8: name -> that of its scales
    self._mxfp4 = set()  # names of matrices, as _stacked has them
    scheme = content.get(compressed.KEY)
    with naming(self.source):
      if float8.applies(scheme):
        self.shapes, self._scales = float8.logical(shapes)
      elif mxfp4.applies(scheme):
        self.shapes, self._mxfp4 = mxfp4.logical(shapes)
      elif scheme:
        self.shapes, self.formats = compressed.logical(shapes, scheme)
    self._parts = {}  # name -> the matrix that holds it, and its rows there
    self._stacked = {}  # name -> stored_names.Stacked
    if hf_config.is_fused(content):
      self._split(config(directory, "float32"))

  def _split(self, config: TransformerConfig) -> None:
    """Replaces matrices that hold several by these.

    Raises ValueError where they have other sizes.
    """
    with naming(self.source):
      self._parts = stored_names.split(self.shapes, config, self.source)
    for name, (whole, _) in self._parts.items():
      if whole in self.formats:
        self.formats[name] = self.formats[whole]
    self._stacked = stored_names.stacked(config)
    wholes = {x.whole: self.shapes.get(x.whole) for x in self._stacked.values()}
    for name, (whole, columns) in self._stacked.items():
      self.shapes.pop(whole, None)
      if wholes[whole] is not None:
        if len(wholes[whole]) < 2:
          raise ValueError(
            f"{whole} in {self.source} has shape {wholes[whole]}; experts are "
            "stacked along its first dimension"
          )
        experts, *inputs, outputs = wholes[whole]
        outputs = len(range(outputs)[columns])
        self.shapes[name] = experts, outputs, *inputs

  def integers(
    self, name: str, tensor: names.Tensor | None = None
  ) -> Quantized:
    """Returns a matrix of `formats` as it is stored, its scales as float32."""
    del tensor
    whole, rows = self._parts.get(name, (name, slice(None)))
    if self.formats[name].kind == "int4":
      packed = self._slice(whole + compressed.PACKED, "I32")
      values = compressed.unpack(packed[:])
    else:
      values = self._slice(whole, "I8")[:]
    scale = self._slice(f"{whole}_scale", *_FLOATS)[:].astype(np.float32)
    return Quantized(values[rows], scale[rows])

  def _slice(self, name: str, *accepted: str):
    """Returns a tensor that is read when it is indexed."""
    stored = self._stored[name]
    stored = self._files[stored].get_slice(stored)
    dtype = stored.get_dtype()
    if dtype not in accepted:
      raise ValueError(
        f"{name} in {self.source} is stored as {dtype}; accepted: "
        f"{', '.join(accepted)}"
      )
    return stored

  def _float8(self, name: str) -> np.ndarray:
    self._slice(name, float8.STORED)
    stored = self._stored[name]
    return self._mapped(self._paths[stored]).tensor(stored)

  def read(
    self, name: str, tensor: names.Tensor, index: tuple[slice, ...] = ()
  ) -> np.ndarray:
    """Reads a slice of a tensor in its stored dtype.

    Raises ValueError unless that is floating point of 16 bits or more.
    """
    del tensor  # only GGUF files need conversion
    if name in self.formats:
      return dequantize(self.integers(name))[index]
    index = index or (slice(None),) * len(self.shapes[name])
    if name in self._stacked:
      return self._experts(self._stacked[name], index)
    if name in self._parts:
      whole, rows = self._parts[name]
      rows = rows[index[0]]
      # Rows that lie apart are read with what lies between them.
      span = slice(int(rows[0]), int(rows[-1]) + 1)
      part = self._stored_slice(whole, (span, *index[1:]))
      return part if len(part) == len(rows) else part[rows - rows[0]]
    return self._stored_slice(name, index)

  def _experts(
    self, stacked: stored_names.Stacked, index: tuple[slice, ...]
  ) -> np.ndarray:
    """Reads a slice [experts, out, in] or [experts, out] of stacked experts."""
    name, columns = stacked
    experts, outputs, *inputs = index
    if name in self._mxfp4:
      parts = self._slice(name + mxfp4.BLOCKS, mxfp4.STORED)
      scales = self._slice(name + mxfp4.SCALES, mxfp4.STORED)
      columns = range(parts.get_shape()[1])[columns][outputs]
      span = slice(columns[0], columns[-1] + 1)
      read = mxfp4.dequantize(parts[experts, span], scales[experts, span])
      return read[:, :: columns.step, inputs[0]]
    stored = self._slice(name, *_FLOATS)
    columns = range(stored.get_shape()[-1])[columns][outputs]
    span = slice(columns[0], columns[-1] + 1)
    read = stored[(experts, *inputs, span)][..., :: columns.step]
    return read.swapaxes(1, 2) if inputs else read

  def _stored_slice(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a slice of a tensor of the file, of float8 times its scales."""
    if name in self._scales:
      scale = self._slice(self._scales[name], *_FLOATS)[:]
      return float8.dequantize(self._float8(name), scale, index)
    return self._slice(name, *_FLOATS)[index]


def _weight_map(index: Path) -> dict[str, Any]:
  """Reads name -> shard of an index, neither checked."""
  shards = read_json(index).get("weight_map")
  if not isinstance(shards, dict) or not shards:
    raise ValueError(f"{index} has no weight_map")
  return shards


def shards(directory: Path) -> list[Path]:
  """Returns the safetensors files of a directory; raises as `Weights`."""
  index = directory / INDEX
  if not index.is_file():
    return [directory / SINGLE]
  shards = _weight_map(index)
  for shard in shards.values():
    if not (isinstance(shard, str) and shard and Path(shard).name == shard):
      raise ValueError(
        f"{index} lists {shard!r:.60}; a shard must lie in the same directory"
      )
    if not (directory / shard).is_file():
      raise FileNotFoundError(f"{directory} lacks {shard}, listed in {INDEX}")
  return [directory / shard for shard in sorted(set(shards.values()))]


def save_safetensors(
  directory: str | Path,
  params: dict,
  config: TransformerConfig,
  trained_length: int | None = None,
) -> None:
  """Writes config.json and model.safetensors in Hugging Face's format.

  Args:
    trained_length: positions that the model is for, where that is known.

  Raises:
    FileExistsError: the directory has weights that would be read instead.
    NotWritten: the disk is full.
    ValueError: as `write_config`.
  """
  directory = remote.as_path(directory)
  for other in (ORBAX, INDEX):
    if (directory / other).exists():
      raise FileExistsError(
        f"{directory} holds {other}, which would be read instead of "
        f"{SINGLE}; write into another folder, or remove it"
      )
  write_config(directory, params, config, trained_length)
  flat, arrays = traverse_util.flatten_dict(params, sep="/"), {}
  leaves = {x.hugging_face: flat[x.path] for x in names.tensors(config)}
  for whole, parts in stored_names.fused(config).items():
    rows = np.concatenate([part.rows for part in parts])
    held = [leaves.pop(part.tensor.hugging_face) for part in parts]
    leaves[(whole,)] = jax.tree.map(functools.partial(_joined, rows), *held)
  for name, (whole, columns) in stored_names.stacked(config).items():
    array = np.asarray(leaves.pop((name,)))
    array = array.swapaxes(1, -1) if array.ndim == 3 else array
    if columns == slice(None):
      arrays[whole] = np.ascontiguousarray(array)
      continue
    shape = *array.shape[:-1], 2 * array.shape[-1]
    arrays.setdefault(whole, np.empty(shape, array.dtype))[..., columns] = array
  for stored, leaf in leaves.items():
    if isinstance(leaf, Quantized):
      arrays |= compressed.arrays(stored[0], leaf)
      continue
    array = np.asarray(leaf)
    arrays |= zip(stored, array if len(stored) > 1 else [array])
  save_arrays(directory, arrays)


def save_arrays(
  directory: Path, arrays: dict[str, np.ndarray], name: str = SINGLE
) -> None:
  """Writes a safetensors file next to config.json; raises NotWritten."""
  with files.written(directory / name) as file:
    try:
      save_file(arrays, file, metadata={"format": "pt"})
      # save_file lets no one else read it, whatever the umask says.
      if file == directory / name:
        mode = (directory / "config.json").stat().st_mode
        file.chmod(stat.S_IMODE(mode))
    except SafetensorError as error:
      raise OSError(str(error)) from error


def _joined(rows: np.ndarray, *matrices: jax.Array) -> np.ndarray:
  """Returns one matrix of several, of which `rows` are the places."""
  stacked = np.concatenate([np.asarray(matrix) for matrix in matrices])
  return stacked[np.argsort(rows)]


def write_config(
  directory: Path,
  params: dict,
  config: TransformerConfig,
  trained_length: int | None = None,
) -> None:
  """Writes config.json, after checking that params match it.

  Raises ValueError where they do not, or no Hugging Face architecture has these
  options.
  """
  bare = dataclasses.replace(config, weights=None, kv=None)
  rendered = hf_config.render(bare)
  flat = traverse_util.flatten_dict(params, sep="/")
  logical = {
    path: leaf.values if isinstance(leaf, Quantized) else leaf
    for path, leaf in flat.items()
  }
  names.check(
    {tensor.path: tensor.shape for tensor in names.tensors(config)},
    {path: leaf.shape for path, leaf in logical.items()},
    "params",
  )
  if trained_length:
    rendered.setdefault("max_position_embeddings", trained_length)
  rendered["torch_dtype"] = str(flat["final_norm/scale"].dtype)
  if any(isinstance(leaf, Quantized) for leaf in flat.values()):
    formats = {
      name.removesuffix(".weight"): config.format_of(path)
      for path, name in stored_names.in_file(config).items()
      if path.endswith("/weight")
    }
    rendered[compressed.KEY] = compressed.scheme(
      {name: x if x.is_integer else None for name, x in formats.items()}
    )
  files.make_folder(directory)
  text = json.dumps(rendered, indent=2) + "\n"
  files.replace_file(directory / "config.json", text)
