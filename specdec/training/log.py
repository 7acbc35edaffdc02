"""Writes a run's metrics as JSON lines and for TensorBoard.

Invariant: after a resume the file holds every step once, as in an uninterrupted
run. Only the first of several processes writes.
"""

import json
import math
from pathlib import Path

from specdec import multihost
from specdec.utils import files, remote
from specdec.utils.event_files import EventFile


def score(measures: dict) -> float:
  """Returns what is lowest in the best evaluation: the held-out loss.

  Of a block drafter it is the accepted length, negated: its loss has parts that
  decide no draft token, which may rise while more of them are accepted.
  """
  if "accepted_length" in measures:
    return -measures["accepted_length"]
  return measures["loss"]


class Log:
  """`metrics.jsonl` and `tensorboard/` in a run's folder.

  Attributes:
    lowest: lowest `score` so far.
  """

  def __init__(self, folder: Path, step: int):
    """Opens the log of a run that resumes after `step`, dropping later entries.

    Raises:
      NotWritten: the disk is full, for example.
    """
    self._path = path = folder / "metrics.jsonl"
    entries = files.read_json_lines(path) if path.is_file() else []
    entries = [entry for entry in entries if entry["step"] <= step]
    files.replace_text(
      path, "".join(json.dumps(entry) + "\n" for entry in entries)
    )
    lowest = min(
      (score(entry) for entry in entries if entry["kind"] == "held_out"),
      default=math.inf,
    )
    self.lowest = float(multihost.agree(lowest))
    self._events = None
    if multihost.is_first():
      self._folder = local = folder / "tensorboard"
      if remote.is_remote(folder):
        local = remote.scratch() / "tensorboard"
      with files.naming_errors(self._folder):
        self._events = EventFile(local, step + 1)
        self._mirror()

  def write(self, step: int, kind: str, measures: dict) -> None:
    """Appends an entry.

    Args:
      kind: 'train', 'held_out' or 'decoding'.
      measures: name -> number, or list of numbers.

    Raises:
      NotWritten: the disk is full, for example.
    """
    if kind == "held_out":
      self.lowest = min(self.lowest, score(measures))
    if self._events is None:
      return
    entry = {"step": step, "kind": kind, **measures}
    files.append(self._path, json.dumps(entry) + "\n")
    with files.naming_errors(self._folder):
      for name, value in measures.items():
        parts = {f"{kind}/{name}": value}
        if isinstance(value, list):
          parts = {f"{kind}/{name}/{i}": x for i, x in enumerate(value, 1)}
        for tag, part in parts.items():
          if part is not None:
            self._events.scalar(step, tag, part)
      self._events.flush()
      self._mirror()

  def close(self) -> None:
    """Closes the event file, which is flushed already."""
    if self._events:
      self._events.close()
    files.flush()

  def _mirror(self) -> None:
    if remote.is_remote(self._folder):
      for file in (remote.scratch() / "tensorboard").iterdir():
        remote.mirror(file, self._folder / file.name)
