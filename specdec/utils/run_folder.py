"""Folders of long runs: locked against other programs, claimed by settings.

Invariant: after a kill at any moment the same command resumes from the folder
and repeats nothing that was recorded. Only one program writes to a folder at a
time, and only its first process.
"""

import contextlib
import datetime
import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from specdec import multihost
from specdec.utils import files, remote, terminal

_locks: dict[Path, TextIO] = {}  # folder -> its lock file, open while locked
_created: set[Path] = set()  # locked folders that did not exist before


def lock(folder: Path) -> None:
  """Creates a folder and locks it against other programs until `release`.

  Of several processes of one run, the first takes the lock. Completes every
  `replace_folder` that was interrupted in this folder.

  Raises:
    BlockingIOError: another process has the lock; the message names it.
    NotWritten: the folder cannot be created.
  """
  if not multihost.is_first():
    return
  if remote.is_remote(folder):
    with files.naming_errors(folder / ".lock"):
      remote.lock(folder, _holder())
    return
  folder = folder.resolve()
  if folder in _locks:
    return
  with files.naming_errors(folder / ".lock"):
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
  except OSError as error:  # for example a network file system without locks
    terminal.report(
      f"warning: {folder} cannot be locked ({error.strerror}); make sure that "
      "no other process writes there",
      file=sys.stderr,
    )
  with files.naming_errors(folder / ".lock"):
    file.truncate(0)
    file.write(_holder())
    file.flush()
  _locks[folder] = file
  for old in folder.glob(".*.old"):
    files.restore(folder / old.name[1 : -len(".old")])


def _holder() -> str:
  """Describes this process to whoever finds its lock."""
  now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
  return (
    f"process {os.getpid()} on {socket.gethostname()} since {now} "
    f"({shlex.join(sys.argv)})"
  )


def lock_of(folder: Path) -> int:
  """Returns the descriptor of a lock, for a child that shall share it."""
  return _locks[folder.resolve()].fileno()


def release() -> None:
  """Releases all locks; removes folders created by `lock` and still empty.

  Uploads what was appended to remote files, or says that it could not.
  """
  try:
    files.flush()
  except files.NotWritten as error:
    terminal.report(f"warning: {error}", file=sys.stderr)
  remote.close()
  while _locks:
    folder, file = _locks.popitem()
    with contextlib.suppress(OSError):  # it may have been removed
      if folder in _created and os.listdir(folder) == [".lock"]:
        (folder / ".lock").unlink()
        folder.rmdir()
    _created.discard(folder)
    file.close()


def differences(
  before: dict[str, Any],
  now: dict[str, Any],
  free: Iterable[str] = (),
  prefix: str = "",
) -> list[str]:
  """Lists the entries of nested dicts that differ, as 'name: old -> new'.

  Ignores the names in `free` at any depth; `prefix` begins every name.
  """
  changes = []
  for name in sorted(before.keys() | now.keys()):
    old, new = before.get(name), now.get(name)
    if isinstance(old, dict) and isinstance(new, dict):
      changes += differences(old, new, free, f"{prefix}{name}.")
    elif old != new and name not in free:
      changes.append(f"{prefix}{name}: {old} -> {new}")
  return changes


def check_same(
  message: str, before: dict[str, Any], now: dict[str, Any]
) -> None:
  """Raises ValueError where two nested dicts differ, naming the entries."""
  changes = differences(before, now)
  if changes:
    raise ValueError(f"{message}: {'; '.join(changes)}")


def check(
  folder: Path, settings: dict[str, Any], free: Iterable[str] = ()
) -> None:
  """Raises ValueError where `claim` would; takes and writes nothing."""
  path = folder / "run.json"
  if not path.is_file():
    return
  settings = json.loads(json.dumps(settings))  # tuples become lists
  try:
    recorded = dict(json.loads(path.read_text(encoding="utf-8")))
  except (ValueError, TypeError) as error:
    raise ValueError(f"{path} holds no run's settings: {error}") from None
  changes = differences(recorded, settings, free)
  if changes:
    raise ValueError(
      f"{folder} holds a run with other settings ({'; '.join(changes)}); "
      "take another folder, or resume it with the same settings"
    )


def claim(
  folder: Path,
  settings: dict[str, Any],
  free: Iterable[str] = (),
  shared: bool = False,
) -> None:
  """Locks `folder` for a run and records its settings in run.json.

  Args:
    settings: what defines the run, as JSON values.
    free: names of settings that may change when the run is resumed.
    shared: allows other programs to write to the folder: takes no lock.

  Raises:
    BlockingIOError: another process has the lock.
    ValueError: the folder holds a run with other settings; they are listed.
  """
  if not multihost.is_first():
    return
  if shared:
    files.make_folder(folder)
  else:
    lock(folder)
  check(folder, settings, free)
  files.replace_text(folder / "run.json", json.dumps(settings, indent=1) + "\n")
