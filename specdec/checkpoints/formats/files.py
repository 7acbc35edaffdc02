"""Opens a folder with somebody's drafter: config and tensors, not yet read."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.checkpoints import compressed, float8, huggingface
from specdec.checkpoints.formats import pickled
from specdec.utils.spelling import join_names, naming

# As drafters are published; a folder has one of them, or an index of shards.
_SAFETENSORS = huggingface.SINGLE, "medusa_lm_head.safetensors"
_PICKLED = "pytorch_model.bin", "medusa_lm_head.pt"
PATTERNS = ("*.safetensors", "*.json", *_PICKLED)  # to download


class Files(NamedTuple):
  """A drafter's folder, its tensors not yet read."""

  source: str
  config: dict[str, Any]
  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]  # name -> the tensor, in its stored dtype


def open_folder(folder: Path) -> Files:
  """Opens a folder with config.json and safetensors, or pickled tensors.

  Raises:
    FileNotFoundError: it lacks a file.
    ValueError: a file is damaged, or holds something other than tensors.
  """
  config = huggingface.read_json(folder / "config.json", required=True)
  source = str(folder)
  paths = [folder / name for name in _SAFETENSORS]
  if (folder / huggingface.INDEX).is_file():
    paths = huggingface.shards(folder)
  paths = [path for path in paths if path.is_file()]
  if paths:
    with naming(source):
      return Files(source, config, *_safetensors(paths, config))
  for name in _PICKLED:
    if (folder / name).is_file():
      return Files(source, config, *_pickle(folder / name))
  raise FileNotFoundError(
    f"{folder} holds no weights: none of "
    f"{join_names((huggingface.INDEX, *_SAFETENSORS, *_PICKLED))}"
  )


def _safetensors(paths: list[Path], config: Mapping[str, Any]):
  """Returns shapes and reader of the tensors in all files; of matrices in
  float8 it returns float32."""
  stored, path_of = {}, {}
  for path in paths:
    file = huggingface.open_safetensors(path, "numpy")
    stored |= {name: file for name in file.keys()}  # noqa: SIM118
    path_of |= {name: path for name in file.keys()}  # noqa: SIM118
  shapes = {
    name: tuple(file.get_slice(name).get_shape())
    for name, file in stored.items()
  }
  scales = {}  # of matrices in float8
  mapped = functools.cache(float8.Mapped)  # a file's header is read once
  if float8.applies(scheme := config.get(compressed.KEY)):
    float8.check(scheme, "config.json")
    shapes, scales = float8.logical(shapes)

  def read(name: str) -> np.ndarray:
    if name not in scales:
      return stored[name].get_tensor(name)
    values = mapped(path_of[name]).tensor(name)
    scale = stored[scales[name]].get_tensor(scales[name])
    return float8.dequantize(values, scale, (slice(None),) * 2)

  return shapes, read


def _pickle(path: Path):
  """Returns shapes and reader of the tensors that torch.save wrote."""
  tensors = pickled.read(path)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return shapes, lambda name: tensors[name].read()
