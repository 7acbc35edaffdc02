"""Directories as Hugging Face lays them out, weights in safetensors only.

Invariant: nothing is unpickled; a directory with nothing but pickled weights
is refused.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec.checkpoints import hf_config, names
from specdec.models.config import TransformerConfig
from specdec.utils import files

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
  """A JSON object; {} where the file is absent and not required.

  Raises:
    FileNotFoundError: it is absent and required.
    ValueError: it is not a JSON object.
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
    raise ValueError(f"{path} holds no JSON object")
  return content


def has_weights(directory: Path) -> bool:
  """Whether there are safetensors weights to load."""
  return any((directory / name).is_file() for name in (INDEX, SINGLE))


def config(directory: Path, dtype: str) -> TransformerConfig:
  """The config in a directory's config.json; errors as `hf_config.parse`."""
  path = directory / "config.json"
  return hf_config.parse(read_json(path, required=True), str(path), dtype)


def eos_tokens(directory: Path) -> tuple[int | str, ...]:
  """Tokens that end a text, from the first file that names any.

  The order is the one in which transformers' own generation looks. A tokenizer
  config names the token by its string, the others by their ids.
  """
  for name in ("generation_config.json", "config.json"):
    ids = read_json(directory / name).get("eos_token_id")
    if ids is not None:
      ids = ids if isinstance(ids, list) else [ids]
      bad = [i for i in ids if type(i) is not int or not 0 <= i < 2**31]
      if bad:
        raise ValueError(
          f"{directory / name} has eos_token_id = {bad[0]!r:.60}; it must be a "
          "token's number, or a list of them"
        )
      return tuple(ids)
  token = special_tokens(directory).get("eos_token")
  return () if token is None else (token,)


def special_tokens(directory: Path) -> dict[str, str]:
  """Texts of the special tokens that tokenizer_config.json names.

  Raises:
    ValueError: one is no text.
  """
  path = directory / "tokenizer_config.json"
  found = {}
  for name, value in read_json(path).items():
    if name not in _SPECIAL or value is None:
      continue
    # Plain, or with its options around it.
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
      raise ValueError(f"{path} has {name} = {value!r:.60}; it must be a text")
    found[name] = text
  return found


class Weights:
  """The tensors of a directory, by their Hugging Face names, read lazily."""

  def __init__(self, directory: Path):
    """Opens the shards and reads their headers.

    Raises:
      FileNotFoundError: a shard that the index names is absent.
      ValueError: a file is damaged.
    """
    self.source = str(directory)
    self._files = {}
    for path in _shards(directory):
      try:
        file = safe_open(path, framework="numpy")
      except SafetensorError as error:
        raise ValueError(
          f"{path} is not a complete safetensors file: {error}"
        ) from error
      self._files |= {name: file for name in file.keys()}  # noqa: SIM118

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor."""
    return {
      name: tuple(file.get_slice(name).get_shape())
      for name, file in self._files.items()
    }

  def read(
    self, name: str, tensor: names.Tensor, index: tuple[slice, ...] = ()
  ) -> np.ndarray:
    """One tensor, or a slice of it, in the type it is stored in; what is
    outside the slice is not read.

    Raises:
      ValueError: it is not stored as floating point of 16 bits or more.
    """
    del tensor  # it already stands as we want it
    part = self._files[name].get_slice(name)
    kind = part.get_dtype()
    if kind not in _FLOATS:
      raise ValueError(
        f"{name} in {self.source} is stored as {kind}; accepted: "
        f"{', '.join(_FLOATS)}"
      )
    return part[index or (slice(None),) * len(part.get_shape())]


def _shards(directory: Path) -> list[Path]:
  index = directory / INDEX
  if not index.is_file():
    return [directory / SINGLE]
  shards = read_json(index).get("weight_map")
  if not isinstance(shards, dict) or not files:
    raise ValueError(f"{index} has no weight_map")
  for shard in shards.values():
    if not isinstance(shard, str) or Path(shard).name != shard or not shard:
      raise ValueError(
        f"{index} names {shard!r:.60}; a shard must lie in the same directory"
      )
    if not (directory / shard).is_file():
      raise FileNotFoundError(f"{directory} lacks {shard}, named in {INDEX}")
  return [directory / shard for shard in sorted(set(shards.values()))]


def save_safetensors(
  directory: str | Path, params: dict, config: TransformerConfig
) -> None:
  """Writes config.json and model.safetensors, readable by `load` and others.

  Args:
    directory: created where absent; the two files are replaced.
    params: the tree that `load` gives.
    config: of the model.

  Raises:
    ValueError: params do not fit config, or the config has no such form.
  """
  directory = Path(directory)
  write_config(directory, params, config)
  flat, arrays = traverse_util.flatten_dict(params, sep="/"), {}
  for tensor in names.tensors(config):
    array = np.asarray(flat[tensor.path])
    arrays |= zip(
      tensor.hugging_face, array if len(tensor.hugging_face) > 1 else [array]
    )
  with files.errors_name(directory / SINGLE):
    try:
      save_file(arrays, directory / SINGLE, metadata={"format": "pt"})
    except SafetensorError as error:
      raise OSError(str(error)) from error


def write_config(
  directory: Path, params: dict, config: TransformerConfig
) -> None:
  """Writes config.json of a model whose weights are about to be written.

  Raises:
    ValueError: params do not fit config, or the config has no such form.
  """
  rendered = hf_config.render(config)
  flat = traverse_util.flatten_dict(params, sep="/")
  names.check(
    {tensor.path: tensor.shape for tensor in names.tensors(config)},
    {path: leaf.shape for path, leaf in flat.items()},
    "params",
  )
  rendered["torch_dtype"] = str(next(iter(flat.values())).dtype)
  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(rendered, indent=2) + "\n"
  files.replace_file(directory / "config.json", text)
