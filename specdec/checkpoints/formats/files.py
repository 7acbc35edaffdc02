"""Opens a folder with somebody's drafter: config and tensors, not yet read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec.checkpoints import huggingface
from specdec.checkpoints.formats import pickled
from specdec.utils.spelling import join_names

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
    return Files(source, config, *_safetensors(paths))
  for name in _PICKLED:
    if (folder / name).is_file():
      return Files(source, config, *_pickle(folder / name))
  raise FileNotFoundError(
    f"{folder} holds no weights: none of "
    f"{join_names((huggingface.INDEX, *_SAFETENSORS, *_PICKLED))}"
  )


def _safetensors(paths: list[Path]):
  """Returns shapes and reader of the tensors in all files."""
  stored = {}
  for path in paths:
    file = huggingface.open_safetensors(path, "numpy")
    stored |= {name: file for name in file.keys()}  # noqa: SIM118
  shapes = {
    name: tuple(file.get_slice(name).get_shape())
    for name, file in stored.items()
  }
  return shapes, lambda name: stored[name].get_tensor(name)


def _pickle(path: Path):
  """Returns shapes and reader of the tensors that torch.save wrote."""
  tensors = pickled.read(path)
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return shapes, lambda name: tensors[name].read()
