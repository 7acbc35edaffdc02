"""Reads tensors that torch.save wrote, without torch and without its code.

Such a file is a zip archive of a pickle and of one raw file a storage. The
unpickler here knows a dictionary, a storage and a tensor, which views one.
Whatever else the pickle names is refused before it is called, so that nothing
of the file is ever run.
"""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_DTYPES = {
  "DoubleStorage": np.float64,
  "FloatStorage": np.float32,
  "HalfStorage": np.float16,
  "BFloat16Storage": ml_dtypes.bfloat16,
  "LongStorage": np.int64,
  "IntStorage": np.int32,
  "BoolStorage": np.bool_,
}


class _Storage(NamedTuple):
  """A file of the archive that holds raw numbers."""

  dtype: Any
  name: str
  size: int


class Tensor(NamedTuple):
  """A view of a storage, not yet read."""

  path: Path
  prefix: str  # of names in the archive
  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]

  def read(self) -> np.ndarray:
    """Returns the array, in its stored dtype; raises ValueError if damaged."""
    member = f"{self.prefix}/data/{self.storage.name}"
    try:
      with zipfile.ZipFile(self.path) as archive:
        flat = np.frombuffer(archive.read(member), self.storage.dtype)
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
      raise ValueError(f"{self.path} is damaged: {error}") from error
    last = self.offset + sum(
      (n - 1) * s for n, s in zip(self.shape, self.strides)
    )
    if 0 in self.shape:
      return np.empty(self.shape, self.storage.dtype)
    if last >= len(flat):
      raise ValueError(
        f"{self.path} is damaged: a tensor lies outside its data"
      )
    view = np.lib.stride_tricks.as_strided(
      flat[self.offset :],
      self.shape,
      [s * flat.itemsize for s in self.strides],
      writeable=False,
    )
    return np.array(view)


class _Unpickler(pickle.Unpickler):
  """Rebuilds dictionaries of tensors, and nothing else."""

  def __init__(self, file, path: Path, prefix: str):
    super().__init__(file)
    self._path, self._prefix = path, prefix

  def find_class(self, module: str, name: str):
    if (module, name) == ("collections", "OrderedDict"):
      return OrderedDict
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
      return self._tensor
    if module == "torch" and name in _DTYPES:
      return _DTYPES[name]
    raise ValueError(
      f"{self._path} holds {module}.{name}; a drafter's file may hold tensors "
      "only, as anything else could run code: convert it to safetensors"
    )

  def persistent_load(self, saved):
    kind, dtype, name, _, size = saved
    if kind != "storage" or not str(name).isalnum():
      raise ValueError(f"{self._path} is damaged: {kind!r} is no storage")
    return _Storage(dtype, name, size)

  def _tensor(self, storage, offset, size, stride, *_):
    numbers = offset, *size, *stride
    whole = all(type(x) is int and x >= 0 for x in numbers)
    if not (
      isinstance(storage, _Storage) and whole and len(size) == len(stride)
    ):
      raise ValueError(f"{self._path} is damaged: a tensor of no storage")
    return Tensor(
      self._path, self._prefix, storage, offset, tuple(size), tuple(stride)
    )


def read(path: Path) -> dict[str, Tensor]:
  """Returns name -> Tensor of a file that torch.save wrote.

  Raises:
    ValueError: it is damaged, older than torch 1.6, or holds something other
      than named tensors.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      [name] = [x for x in archive.namelist() if x.endswith("/data.pkl")]
      prefix = name.removesuffix("/data.pkl")
      with archive.open(name) as file:
        content = _Unpickler(file, path, prefix).load()
  except zipfile.BadZipFile as error:
    raise ValueError(
      f"{path} is no zip archive, as torch.save writes since version 1.6"
    ) from error
  except ValueError:
    raise
  except Exception as error:  # a pickle can fail in any way
    raise ValueError(
      f"{path} is damaged: {type(error).__name__}: {error}"
    ) from error
  named = isinstance(content, dict) and all(
    isinstance(key, str) and isinstance(x, Tensor) for key, x in content.items()
  )
  if not named or not content:
    raise ValueError(f"{path} does not hold named tensors")
  return dict(content)
