"""Names the folder that Orbax could not write, and why."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from specdec.utils.files import NotWritten

# Messages of TensorStore's system errors, which are not OSErrors.
_SYSTEM_ERROR = re.compile(
  "no space left|RESOURCE_EXHAUSTED|disk quota|permission|file too large|"
  "read-only file system|input/output error",
  re.IGNORECASE,
)


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
  """Raises NotWritten for system errors of Orbax's writers."""
  try:
    yield
  except Exception as error:
    code = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore's
    is_system = code or _SYSTEM_ERROR.search(str(error))
    if not (isinstance(error, OSError) or is_system):
      raise
    line = (str(error).splitlines() or [type(error).__name__])[0][:300]
    reason = os.strerror(int(code[1])) if code else line
    if isinstance(error, OSError) and error.strerror:
      reason = error.strerror
    raise NotWritten(f"{folder} could not be written: {reason}") from error
