"""Crash-safe files and folders.

Invariant: after a kill at any moment, or with a full disk, a file or folder has
either its old or its new content, and no line that was appended is lost. Paths
of an object store promise less: utils/remote.py says what.
"""

import contextlib
import functools
import glob
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specdec import multihost
from specdec.utils import remote

_HOST = socket.gethostname()[:40]


def flush() -> None:
  """Uploads what was appended to remote files so far.

  Raises NotWritten where that fails; it is not tried again.
  """
  for path in remote.grown():
    with naming_errors(path):
      try:
        remote.upload_copy(path)
      except Exception:
        remote.forget(path)
        raise


class NotWritten(OSError):
  """A file could not be written; the message names the file and the reason."""


def replace_file(
  path: str | os.PathLike, content: str | bytes | Callable[[BinaryIO], object]
) -> None:
  """Writes a file atomically: it has either its old or its new content.

  A function as `content` writes to an open binary file. Raises NotWritten where
  the disk is full, for example.
  """
  if isinstance(content, str):
    content = content.encode()
  if remote.is_remote(path):
    remote.forget(path)
    with written(remote.as_path(path)) as file, file.open("wb") as opened:
      _write(opened, content)
    return
  with naming_errors(path):
    target = Path(path).resolve()  # keeps symbolic links
    if is_stream(path):
      with open(path, "wb") as file:
        return _write(file, content)
    _remove_scratch_once(target.parent)
    scratch = _scratch(target)
    try:
      with scratch.open("wb") as file:
        _write(file, content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(scratch, target)
    except BaseException:
      scratch.unlink(missing_ok=True)
      raise


def _scratch(target: Path) -> Path:
  """Names what is incomplete after the process: others may write it too."""
  name = os.fsdecode(os.fsencode(target.name)[:150])
  return target.with_name(f".{name}.{_HOST}.{os.getpid()}.part")


def _remove_scratch(folder: Path) -> None:
  """Removes what processes of this host left that no longer exist."""
  for file in folder.glob(f".*.{glob.escape(_HOST)}.*.part"):
    # Other errors mean that the process is alive or another user's.
    with contextlib.suppress(OSError, ValueError, OverflowError):
      try:
        os.kill(int(file.name.split(".")[-2]), 0)
      except ProcessLookupError:
        shutil.rmtree(file) if file.is_dir() else file.unlink()


# Once in a process, since folders can be large.
_remove_scratch_once = functools.cache(_remove_scratch)


def replace_folder(
  path: str | os.PathLike, write: Callable[[Path], object]
) -> None:
  """Replaces a folder as a whole: it has either its old or its new files.

  `write` creates and fills the local folder that it is given. Raises NotWritten
  where the disk is full, for example.
  """
  if remote.is_remote(path):
    with tempfile.TemporaryDirectory() as scratch:
      folder = Path(scratch) / "new"
      with naming_errors(folder):
        write(folder)
      with naming_errors(path):
        remote.upload_folder(folder, remote.as_path(path))
    return
  target = Path(path).resolve()  # keeps symbolic links
  scratch, old = _scratch(target), target.with_name(f".{target.name}.old")
  with naming_errors(path):
    restore(target)
    _remove_scratch(target.parent)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
      write(scratch)
    except BaseException as error:
      shutil.rmtree(scratch, ignore_errors=True)
      if isinstance(error, NotWritten):  # names what is there no longer
        message = str(error).replace(str(scratch), str(target))
        raise NotWritten(message) from error
      raise
    if target.exists():
      target.rename(old)
    scratch.rename(target)
  shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def written(path) -> Iterator[Path]:
  """Yields a local path for a file, and uploads it if `path` is remote.

  Of a local path it yields the path itself. Raises NotWritten.
  """
  if not remote.is_remote(path):
    with naming_errors(path):
      yield path
    return
  with tempfile.TemporaryDirectory() as scratch:
    file = Path(scratch) / path.name
    with naming_errors(file):
      yield file
    with naming_errors(path):
      remote.upload(file, path)


def make_folder(path) -> None:
  """Creates a folder, and those above it; in a store there are none."""
  if not remote.is_remote(path):
    path.mkdir(parents=True, exist_ok=True)


def move_folder(folder, to) -> None:
  """Moves a folder to a place where none is."""
  if remote.is_remote(folder):
    remote.move_folder(folder, to)
  else:
    folder.rename(to)


def remove_folder(folder: Path) -> None:
  """Removes a folder; a kill leaves all of it or none under its name."""
  gone = folder.with_name(f".{folder.name}.gone")
  shutil.rmtree(gone, ignore_errors=True)
  if folder.exists():
    folder.rename(gone)
    shutil.rmtree(gone)


def restore(target: Path) -> None:
  """Deletes the old folder if the new one is in place, else puts it back."""
  old = target.with_name(f".{target.name}.old")
  if target.exists():
    shutil.rmtree(old, ignore_errors=True)
  elif old.is_dir():
    old.rename(target)


@contextlib.contextmanager
def naming_errors(path: str | os.PathLike) -> Iterator[None]:
  """Converts OSErrors to NotWritten with the name of the file.

  Of a remote file every error, since stores raise many unrelated types.
  """
  try:
    yield
  except NotWritten:
    raise
  except Exception as error:
    if not (remote.is_remote(path) or isinstance(error, OSError)):
      raise
    reason = getattr(error, "strerror", None) or error
    raise NotWritten(f"{path} could not be written: {reason}") from error


def check_space(folder: Path, size: int, what: str) -> None:
  """Raises NotWritten where a disk has less than `size` bytes for `what`.

  A store has room.
  """
  if remote.is_remote(folder):
    return
  folder = folder.absolute()
  present = next(x for x in (folder, *folder.parents) if x.exists())
  free = shutil.disk_usage(present).free
  if size > free:
    raise NotWritten(
      f"{folder} could not be written: {what} takes {size / 1e6:,.1f} MB, and "
      f"{free / 1e6:,.1f} MB are free"
    )


def is_stream(path: str | os.PathLike) -> bool:
  """Whether a path is not a regular file: a pipe, a terminal, /dev/stdout."""
  special = Path(path).exists() and not Path(path).is_file()
  return special or os.fspath(path).startswith(("/dev/std", "/dev/fd/"))


def _write(file: BinaryIO, content) -> None:
  content(file) if callable(content) else file.write(content)


def replace_text(path: Path, text: str) -> None:
  """Writes a text file atomically, in the first process only."""
  if multihost.is_first():
    replace_file(path, text)


def append(path: Path, line: str) -> None:
  """Appends a line in the first process.

  Raises NotWritten, leaving none of it, or in a store all of it for `flush`.
  """
  if not multihost.is_first():
    return
  if remote.is_remote(path):
    with naming_errors(path):
      copy = remote.copy_of(path)
      append(copy, line)
      remote.mirror(copy, path)
    return
  with naming_errors(path), path.open("ab", buffering=0) as file:
    size = file.tell()
    rest = line.encode()
    try:
      while rest:
        rest = rest[file.write(rest) :]
      os.fsync(file.fileno())
    except BaseException:
      file.truncate(size)
      raise


def load_array(path: Path) -> np.ndarray:
  """Reads an array that can be computed anew.

  Raises:
    ValueError: the file is damaged.
  """
  try:
    with path.open("rb") as file:
      return np.load(file)
  except (ValueError, EOFError) as error:
    raise ValueError(
      f"{path} is damaged ({error}); without it, it is computed again"
    ) from error


def read_json_lines(path: Path) -> list[dict]:
  """Reads a log of JSON objects, without lines that were cut short."""
  try:
    text = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is not UTF-8 ({error})") from None
  return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


class Lines:
  """An append-only file of JSON lines, read if it exists."""

  def __init__(self, path: Path, types: Mapping[str, type] | None = None):
    """Args:
    types: of values that every object has; lines without are broken.
    """
    self.entries: list[dict] = []  # the objects in the file
    self.broken: list[str] = []  # messages about lines that are none
    # Bytes that are no UTF-8 break their line, not the file.
    content = path.read_bytes() if path.is_file() else b""
    content = multihost.agree_text(content.decode("utf-8", "backslashreplace"))
    for number, line in enumerate(content.split("\n"), 1):
      if not line.strip():
        continue
      try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
          raise ValueError
        if any(type(entry.get(x)) is not y for x, y in (types or {}).items()):
          raise ValueError
        self.entries.append(entry)
      except ValueError:
        keys = f" with {', '.join(types)}" if types else ""
        self.broken.append(
          f"line {number} of {path} is not a JSON object{keys}"
        )
    self._path = path
    if content and not content.endswith("\n"):  # a kill cut the last line short
      append(path, "\n")

  def append(self, entry: dict) -> None:
    """Appends an object and syncs the file to disk."""
    append(self._path, json.dumps(entry, allow_nan=False) + "\n")
    self.entries.append(entry)
