"""Curves of a sweep for TensorBoard: a run for every setting and batch, with k
as its step.
"""

import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from specdec import multihost
from specdec.benchmark import sweeps
from specdec.utils import files
from specdec.utils.event_files import EventFile


class Curves:
  """Scalars of points as they are measured, in `folder`.

  Attributes:
    folder: one below it for every curve.
  """

  def __init__(self, folder: Path, lines: Iterable[dict]):
    """Writes anew what was measured before.

    Args:
      lines: of lines.jsonl; those of failed points are left out.
    """
    self.folder = folder
    self._files: dict[str, EventFile] = {}
    for line in lines:
      self.add(line)

  def add(self, line: dict) -> None:
    """Adds a point's scalars, for TensorBoard to see at once.

    Raises:
      NotWritten: the disk is full, for example.
    """
    if "run" not in line or not multihost.is_first():
      return
    run, prediction = line["run"], line["prediction"]
    acceptance, speed = run["acceptance"], run["speed"]
    with files.naming_errors(self.folder):
      file = self._file(f"{sweeps.setting(line)}; batch {run['batch']}")
      for name, value in {
        "speedup/measured": speed["speedup"]["value"],
        "speedup/standard error": speed["speedup"]["error"],
        "speedup/predicted": prediction["speedup"],
        "tokens per second/speculative": speed["tokens_per_second"],
        "tokens per second/baseline": speed["baseline_tokens_per_second"],
        "tokens per target pass": acceptance["tokens_per_pass"]["value"],
      }.items():
        if value is not None:
          file.scalar(run["k"], name, value)
      file.flush()

  def close(self) -> None:
    """Closes the files, which are flushed already."""
    for file in self._files.values():
      file.close()

  def _file(self, curve: str) -> EventFile:
    if curve not in self._files:
      name = re.sub(r"[^\w=.,;() |-]", "_", curve)
      if len(name) > 100:
        name = f"{name[:90]}-{zlib.crc32(curve.encode()):08x}"
      self._files[curve] = EventFile(self.folder / name, 0)
    return self._files[curve]
