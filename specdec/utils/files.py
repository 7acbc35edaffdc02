"""The folder of a long run: whose it is, and how its files are written.

Invariant: a kill at any moment, or a full disk, leaves a folder with which the
same command goes on and repeats nothing that is written down. One program
writes at a time; of its processes the first, and the others' folder is their
memory.
"""

import contextlib
import datetime
import fcntl
import functools
import glob
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from specdec import multihost
from specdec.utils import terminal

_HOST = socket.gethostname()[:40]
_locks: dict[Path, TextIO] = {}  # by folder, open as long as it is held
_created: set[Path] = set()  # those of them that were not there before


def lock(folder: Path) -> None:
  """Keeps other processes out of a folder, which it creates, until `release`.

  A process that ends or is killed loses its locks: the kernel keeps them. Of
  several processes of one run the first has the lock. What a kill within
  `replace_folder` left undone in the folder is completed.

  Raises:
    BlockingIOError: another process has it; the sentence names that process.
  """
  folder = folder.resolve()
  if folder in _locks or not multihost.is_first():
    return
  with errors_name(folder / ".lock"):
    if not folder.is_dir():
      folder.mkdir(parents=True, exist_ok=True)
      _created.add(folder)
    file = (folder / ".lock").open("a+", encoding="utf-8")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):
    file.seek(0)
    holder = " ".join(file.read().split()) or "another process"
    file.close()
    raise BlockingIOError(
      f"{folder} is in use by {holder}; wait until it ends, or take another "
      "folder"
    ) from None
  except OSError as error:  # a network file system without locks
    terminal.report(
      f"warning: {folder} cannot be locked ({error.strerror}); see to it that "
      "no other process writes there",
      file=sys.stderr,
    )
  with errors_name(folder / ".lock"):
    file.truncate(0)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    file.write(
      f"process {os.getpid()} on {socket.gethostname()} since {now} "
      f"({shlex.join(sys.argv)})"
    )
    file.flush()
  _locks[folder] = file
  for old in folder.glob(".*.old"):
    restore(folder / old.name[1 : -len(".old")])


def release() -> None:
  """Gives up every lock of this process.

  Folders that `lock` created and that nothing was written to are removed.
  """
  while _locks:
    folder, file = _locks.popitem()
    with contextlib.suppress(OSError):  # it may be gone
      if folder in _created and os.listdir(folder) == [".lock"]:
        (folder / ".lock").unlink()
        folder.rmdir()
    _created.discard(folder)
    file.close()


class NotWritten(OSError):
  """A sentence that names a file and why it could not be written."""


def replace_file(
  path: str | os.PathLike, content: str | bytes | Callable[[BinaryIO], object]
) -> None:
  """Writes a file so that a kill or a full disk leaves what was there.

  Args:
    content: the file's, or a function that writes it to an open binary file.

  Raises:
    NotWritten: the disk is full, say.
  """
  if isinstance(content, str):
    content = content.encode()
  with errors_name(path):
    target = Path(path).resolve()  # a link stays one
    if is_stream(path):
      with open(path, "wb") as file:
        return _write(file, content)
    _remove_scratch(target.parent)
    # Of its own process: others may be writing the same file.
    name = os.fsdecode(os.fsencode(target.name)[:150])
    scratch = target.with_name(f".{name}.{_HOST}.{os.getpid()}.part")
    try:
      with scratch.open("wb") as file:
        _write(file, content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(scratch, target)
    except BaseException:
      scratch.unlink(missing_ok=True)
      raise


@functools.cache  # once in a process: folders can be long
def _remove_scratch(folder: Path) -> None:
  """Removes what processes of this host that were killed had half written."""
  for file in folder.glob(f".*.{glob.escape(_HOST)}.*.part"):
    # What is left has a living process, or one of another user.
    with contextlib.suppress(OSError, ValueError, OverflowError):
      try:
        os.kill(int(file.name.split(".")[-2]), 0)
      except ProcessLookupError:
        file.unlink()


def replace_folder(
  path: str | os.PathLike, write: Callable[[Path], object]
) -> None:
  """Writes a folder of files; whoever reads it finds the old or the new ones.

  Args:
    write: fills the folder that it is given, which does not exist yet.
  """
  target = Path(path).resolve()  # a link stays one
  scratch, old = (target.with_name(f".{target.name}{x}") for x in ("", ".old"))
  with errors_name(path):
    restore(target)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
      write(scratch)
    except BaseException:
      shutil.rmtree(scratch, ignore_errors=True)
      raise
    if target.exists():
      target.rename(old)
    scratch.rename(target)
  shutil.rmtree(old, ignore_errors=True)


def restore(target: Path) -> None:
  """Completes what a kill within `replace_folder` left undone.

  Puts the old folder back where the new one does not stand yet, and deletes it
  where it does.
  """
  old = target.with_name(f".{target.name}.old")
  if target.exists():
    shutil.rmtree(old, ignore_errors=True)
  elif old.is_dir():
    old.rename(target)


@contextlib.contextmanager
def errors_name(path: str | os.PathLike) -> Iterator[None]:
  """Raises NotWritten instead of any other OSError."""
  try:
    yield
  except NotWritten:  # names it already
    raise
  except OSError as error:
    reason = error.strerror or error
    raise NotWritten(f"{path} could not be written: {reason}") from error


def is_stream(path: str | os.PathLike) -> bool:
  """Whether it is written as it is: a pipe, a terminal, /dev/stdout."""
  special = Path(path).exists() and not Path(path).is_file()
  return special or os.fspath(path).startswith(("/dev/std", "/dev/fd/"))


def _write(file: BinaryIO, content) -> None:
  content(file) if callable(content) else file.write(content)


def replace_text(path: Path, text: str) -> None:
  """Writes a file so that a kill leaves it as it was or as it should be."""
  if multihost.is_first():
    replace_file(path, text)


def differences(
  before: dict[str, Any],
  now: dict[str, Any],
  free: Iterable[str] = (),
  prefix: str = "",
) -> list[str]:
  """'name: then -> now' for every entry that may not change in a run.

  Args:
    free: names that may.
  """
  found = []
  for name in sorted(before.keys() | now.keys()):
    then, value = before.get(name), now.get(name)
    if isinstance(then, dict) and isinstance(value, dict):
      found += differences(then, value, free, f"{prefix}{name}.")
    elif then != value and name not in free:
      found.append(f"{prefix}{name}: {then} -> {value}")
  return found


def claim(
  folder: Path,
  settings: dict[str, Any],
  free: Iterable[str] = (),
  shared: bool = False,
) -> None:
  """Makes `folder` the folder of the run that `settings` define.

  Args:
    free: names of settings that may change from one start to the next.
    shared: other processes may write to it as well.

  Raises:
    BlockingIOError: another process has it.
    ValueError: it holds a run with other settings; they are listed.
  """
  if not multihost.is_first():
    return
  if shared:
    folder.mkdir(parents=True, exist_ok=True)
  else:
    lock(folder)
  path = folder / "run.json"
  settings = json.loads(json.dumps(settings))  # tuples as they will be read
  if path.is_file():
    found = differences(json.loads(path.read_text()), settings, free)
    if found:
      raise ValueError(
        f"{folder} holds a run with other settings ({'; '.join(found)}); take "
        "another folder, or the same settings to go on with it"
      )
  replace_text(path, json.dumps(settings, indent=1) + "\n")


def append(path: Path, line: str) -> None:
  """Adds a line to a file, or leaves the file as it was.

  Raises:
    NotWritten: the disk is full, say.
  """
  if not multihost.is_first():
    return
  with errors_name(path), path.open("ab", buffering=0) as file:
    size = file.tell()
    rest = line.encode()
    try:
      while rest:
        rest = rest[file.write(rest) :]
      os.fsync(file.fileno())
    except BaseException:
      file.truncate(size)
      raise


class Lines:
  """A file of JSON objects, one a line, only ever appended to."""

  def __init__(self, path: Path):
    """Reads what is there; `broken` names the lines that are no object."""
    self.entries: list[dict] = []
    self.broken: list[str] = []
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    content = multihost.agree_text(content)
    for number, line in enumerate(content.split("\n"), 1):
      if not line.strip():
        continue
      try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
          raise ValueError
        self.entries.append(entry)
      except ValueError:
        self.broken.append(f"line {number} of {path} is no JSON object")
    self._path = path
    if content and not content.endswith("\n"):  # a kill cut the last line
      append(path, "\n")

  def append(self, entry: dict) -> None:
    """Adds a line, and sees to it that it is in the file."""
    append(self._path, json.dumps(entry, allow_nan=False) + "\n")
    self.entries.append(entry)
