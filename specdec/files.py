"""Files that appear under their names whole, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


class NotWritten(OSError):
  """A sentence that names a file and why it could not be written."""


def replace(
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
    # Of its own process: others may be writing the same file.
    scratch = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
      with scratch.open("wb") as file:
        _write(file, content)
        file.flush()
        os.fsync(file.fileno())
      os.replace(scratch, target)
    except BaseException:
      scratch.unlink(missing_ok=True)
      raise


def replace_folder(
  path: str | os.PathLike, write: Callable[[Path], object]
) -> None:
  """Writes a folder of files; whoever reads it finds the old or the new ones.

  Args:
    write: fills the folder that it is given, which does not exist yet.
  """
  target = Path(path)
  scratch, old = (target.with_name(f".{target.name}{x}") for x in ("", ".old"))
  for folder in (scratch, old):
    shutil.rmtree(folder, ignore_errors=True)
  with errors_name(path):
    try:
      write(scratch)
    except BaseException:
      shutil.rmtree(scratch, ignore_errors=True)
      raise
    if target.exists():
      target.rename(old)
    scratch.rename(target)
  shutil.rmtree(old, ignore_errors=True)


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
