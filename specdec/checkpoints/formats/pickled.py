"""Reads tensors that torch.save wrote, without torch and without its code.

Such a file is a zip archive of a pickle and of one raw file a storage. The
unpickler here knows a dictionary, a storage and a tensor, which views one.
Whatever else the pickle names is refused before it is called, so that nothing
of the file is ever run.
"""

import contextlib
import io
import pickle
import pickletools
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


# Opcodes of the pickles that torch.save writes; others refuse the file.
_OPCODES = {
  *("PROTO", "FRAME", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MARK"),
  *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINUNICODE", "SHORT_BINUNICODE"),
  *("BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE"),
  *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL"),
  *("STACK_GLOBAL", "REDUCE", "BINPERSID", "SETITEM", "SETITEMS"),
  *("APPEND", "APPENDS", "BUILD", "STOP"),
}
_MOST_BYTES = 64 * 2**20  # of a pickle, which holds names and no numbers
_DEEPEST = 100  # tuples in a row without a name, a number or a call between


class Refused(ValueError):
  """A file that holds something other than tensors, or is damaged."""


@contextlib.contextmanager
def _refusing(path: Path):
  """Raises Refused for whatever goes wrong in a damaged file."""
  try:
    yield
  except Refused:
    raise
  except zipfile.BadZipFile as error:
    raise Refused(
      f"{path} is no whole zip archive, as torch.save writes since version 1.6"
    ) from error
  except Exception as error:  # an archive and a pickle can fail in any way
    raise Refused(
      f"{path} is damaged: {type(error).__name__}: {error}"
    ) from error


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
    """Returns the array, in its stored dtype; raises Refused if damaged."""
    with _refusing(self.path):
      return self._read()

  def _read(self) -> np.ndarray:
    member = f"{self.prefix}/data/{self.storage.name}"
    dtype = np.dtype(self.storage.dtype)
    with zipfile.ZipFile(self.path) as archive:
      size = archive.getinfo(member).file_size
      if size != self.storage.size * dtype.itemsize:
        raise Refused(f"{self.path} is damaged: {member} has {size} bytes")
      flat = np.frombuffer(archive.read(member), dtype)
    if 0 in self.shape:
      return np.empty(self.shape, dtype)
    last = self.offset + sum(
      (n - 1) * s for n, s in zip(self.shape, self.strides)
    )
    if last >= len(flat):
      raise Refused(f"{self.path} is damaged: a tensor lies outside its data")
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
    raise Refused(
      f"{self._path} holds {module}.{name}; a drafter's file may hold tensors "
      "only, as anything else could run code: convert it to safetensors"
    )

  def persistent_load(self, saved):
    kind, dtype, name, _, size = saved
    whole = type(size) is int and size >= 0 and str(name).isalnum()
    if kind != "storage" or dtype not in _DTYPES.values() or not whole:
      raise Refused(f"{self._path} is damaged: {kind!r:.60} is no storage")
    return _Storage(dtype, name, size)

  def _tensor(self, storage, offset, size, stride, *_):
    numbers = offset, *size, *stride
    whole = all(type(x) is int and 0 <= x < 2**62 for x in numbers)
    if not (
      isinstance(storage, _Storage) and whole and len(size) == len(stride)
    ):
      raise Refused(f"{self._path} is damaged: a tensor of no storage")
    return Tensor(
      self._path, self._prefix, storage, offset, tuple(size), tuple(stride)
    )


def _check(content: bytes, path: Path) -> None:
  """Refuses a pickle that could crash or fill the process that reads it."""
  nested = 0
  for opcode, argument, _ in pickletools.genops(content):
    if opcode.name not in _OPCODES:
      raise Refused(
        f"{path} holds {opcode.name}, which no file of tensors has; convert it "
        "to safetensors"
      )
    if opcode.name.endswith("PUT") and argument > len(content):
      raise Refused(f"{path} is damaged: entry {argument} of so few")
    if opcode.name.startswith("TUPLE"):
      nested += 1
    elif "PUT" not in opcode.name and opcode.name != "MEMOIZE":
      nested = 0
    if nested > _DEEPEST:
      raise Refused(f"{path} is damaged: tuples within tuples")


def read(path: Path) -> dict[str, Tensor]:
  """Returns name -> Tensor of a file that torch.save wrote.

  Raises:
    Refused: it is damaged, older than torch 1.6, or holds something other than
      named tensors.
  """
  with _refusing(path):
    with zipfile.ZipFile(path) as archive:
      members = [x for x in archive.namelist() if x.endswith("/data.pkl")]
      if len(members) != 1:
        raise Refused(f"{path} is damaged: {len(members)} data.pkl in it")
      if archive.getinfo(members[0]).file_size > _MOST_BYTES:
        raise Refused(f"{path} is damaged: its data.pkl is too large")
      content = archive.read(members[0])
    _check(content, path)
    prefix = members[0].removesuffix("/data.pkl")
    stored = _Unpickler(io.BytesIO(content), path, prefix).load()
    entries = dict.items(stored) if isinstance(stored, dict) else ()
    tensors = {
      name: tensor
      for name, tensor in entries
      if isinstance(name, str) and isinstance(tensor, Tensor)
    }
    if not tensors or len(tensors) != len(stored):
      raise Refused(f"{path} does not hold named tensors")
  return tensors
