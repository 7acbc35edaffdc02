"""Paths of an object store, gs://BUCKET/FOLDER, for what programs write.

A store has no rename, no lock, no append and no folders, only objects that are
replaced whole. What utils/files.py promises of a local path becomes there:

  a file         written here and uploaded: it has its old or its new content
  a folder       uploaded file by file, config.json deleted first and written
                 last: a checkpoint whose upload was cut has none and is refused
  a line         appended to a copy here, which is uploaded every PERIOD, before
                 each checkpoint of a training run and at the end: a kill loses
                 the lines since, which the same command measures again
  a lock         the object .lock, which names its holder: whoever finds one of
                 another process says so and goes on, since a machine that was
                 taken away leaves its own behind
  Orbax          writes there itself, with a commit file instead of a rename

What programs read, models, texts and settings, is read from local paths alone.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from specdec.utils import terminal

PERIOD = 10.0  # seconds between two uploads of a file that grows
LAST = "config.json"  # without it a checkpoint is none
# The second is a slip of the first, which would name a local folder.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(?:gs|s3):")


class _Copy:
  """A local file that grows, and when it was last uploaded."""

  def __init__(self, file: Path):
    self.file, self.uploaded, self.is_new = file, time.monotonic(), True


_copies: dict[str, _Copy] = {}  # by remote path
_numbers = itertools.count()  # of the copies, of those forgotten too
_locked: set[str] = set()  # remote folders whose .lock is ours
_scratch: list[tempfile.TemporaryDirectory] = []  # of the copies; one or none


def is_remote(path: str | os.PathLike) -> bool:
  """Whether a path has a scheme, as in gs://bucket/folder."""
  return bool(_SCHEME.match(os.fspath(path)))


def as_path(path: str | os.PathLike):
  """Returns a path: pathlib's, or etils.epath's of a store, which is like it.

  Raises ValueError for a scheme other than gs, and where gcsfs is missing.
  """
  if not is_remote(path):
    return Path(path)
  text = os.fspath(path)
  scheme = _SCHEME.match(text)[1]
  if scheme is None:
    raise ValueError(f"{text} has no //, as in gs://bucket/folder")
  if scheme != "gs":
    raise ValueError(
      f"{text}: nothing is written to {scheme}://; accepted: gs://, or a local "
      "path, to copy from"
    )
  if not re.match(r"gs://[^/]+/[^/]", text):
    raise ValueError(f"{text} should be gs://BUCKET/NAME")
  if not _has_gcsfs():
    raise ValueError(
      f"{text} needs gcsfs, which is not installed; `pip install "
      "specdec-jax[gcs]`, or give a local path"
    )
  from etils import epath

  return epath.Path(text)


def _has_gcsfs() -> bool:
  return importlib.util.find_spec("gcsfs") is not None


def check_local(name: str, path: str | os.PathLike) -> None:
  """Raises ValueError where a path, given as `name`, is that of a store."""
  if is_remote(path):
    # A flag, or words that end in a space.
    name = f"{name}=" if name and not name.endswith(" ") else name
    raise ValueError(
      f"{name}{os.fspath(path)} must be a local path; copy it, as with "
      f"`gcloud storage cp --recursive {os.fspath(path)} .`"
    )


def check_writable(name: str, path: str) -> None:
  """Raises ValueError where next to `path`, given as `name`, nothing can be
  written and removed."""
  try:
    trial = as_path(path)
    trial = trial.with_name(f".{trial.name}.trial")
    trial.write_text("")
    trial.unlink()
  except ValueError as error:
    raise ValueError(f"{name}={error}") from error
  # Stores, and libraries that log in to them, raise many unrelated types.
  except Exception as error:
    reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(f"{name}={path} cannot be written: {reason}") from error


def upload(file: Path, path) -> None:
  """Copies a local file to an object, which is then replaced whole."""
  with file.open("rb") as source, path.open("wb") as target:
    try:
      shutil.copyfileobj(source, target, 1 << 24)
    except BaseException:
      # Closed, it would become an object with what was copied so far.
      with contextlib.suppress(Exception):
        target.discard()
      with contextlib.suppress(AttributeError):
        target.closed = True
      raise


def upload_folder(folder: Path, path) -> None:
  """Makes a remote folder hold the files of a local one, and no others."""
  ours = {
    file.relative_to(folder).as_posix(): file
    for file in sorted(folder.rglob("*"))
    if file.is_file()
  }
  (path / LAST).unlink(missing_ok=True)
  for name in files_in(path):
    if name not in ours:
      (path / name).unlink()
  for name in sorted(ours, key=lambda name: (name == LAST, name)):
    upload(ours[name], path / name)


def files_in(path) -> list[str]:
  """Lists the files in a remote folder and its subfolders, relative to it."""
  found, top = [], os.fspath(path).rstrip("/")
  for folder, _, names in path.walk():
    # Some libraries leave out the scheme of what they list.
    below = os.fspath(folder).partition(top.partition("://")[2])[2].strip("/")
    found += [f"{below}/{name}" if below else name for name in names if name]
  return sorted(found)


def move_folder(path, to) -> None:
  """Moves a remote folder, file by file."""
  for name in files_in(path):
    (path / name).copy(to / name)
  path.rmtree()


def scratch() -> Path:
  """Returns a local folder for copies, which lasts until `close`."""
  if not _scratch:
    _scratch.append(tempfile.TemporaryDirectory(prefix="specdec-"))
  return Path(_scratch[0].name)


def copy_of(path) -> Path:
  """Returns the local copy of a remote file that grows, with its content."""
  text = os.fspath(path)
  if text not in _copies:
    file = scratch() / f"{next(_numbers)}-{path.name}"
    file.write_bytes(path.read_bytes() if path.exists() else b"")
    _copies[text] = _Copy(file)
    _copies[text].is_new = False
  return _copies[text].file


def forget(path) -> None:
  """Drops the local copy of a remote file, which is replaced."""
  _copies.pop(os.fspath(path), None)


def mirror(file: Path, path) -> None:
  """Uploads a local file that has grown, unless that was just done."""
  copy = _copies.setdefault(os.fspath(path), _Copy(file))
  copy.is_new = True
  if time.monotonic() - copy.uploaded >= PERIOD:
    upload_copy(os.fspath(path))


def grown() -> list[str]:
  """Lists the remote files whose local copies hold more than they do."""
  return [path for path, copy in _copies.items() if copy.is_new]


def upload_copy(path: str) -> None:
  """Uploads the local copy of a remote file."""
  copy = _copies[path]
  upload(copy.file, as_path(path))
  copy.uploaded, copy.is_new = time.monotonic(), False


def lock(folder, holder: str) -> None:
  """Names `holder` in the folder's .lock; reports the name that was there."""
  if os.fspath(folder) in _locked:
    return
  file = folder / ".lock"
  if file.exists():
    terminal.report(
      f"warning: {folder} cannot be locked, and was last taken by "
      f"{' '.join(file.read_text().split())}; make sure that it has ended",
      file=sys.stderr,
    )
  file.write_text(holder)
  _locked.add(os.fspath(folder))


def close() -> None:
  """Removes our locks, and the local copies."""
  _copies.clear()
  while _scratch:
    _scratch.pop().cleanup()
  while _locked:
    with contextlib.suppress(Exception):  # a store raises anything
      (as_path(_locked.pop()) / ".lock").unlink(missing_ok=True)
