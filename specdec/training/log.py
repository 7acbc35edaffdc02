"""Writes a run's metrics as JSON lines and for TensorBoard.

Invariant: after a resume the file holds every step once, as in an uninterrupted
run. Only the first of several processes writes.
"""

import contextlib
import json
import math
import time
from pathlib import Path

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from specdec import multihost
from specdec.utils import files, remote


class Log:
  """`metrics.jsonl` and `tensorboard/` in a run's folder.

  Attributes:
    lowest: lowest held-out loss so far.
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
      (entry["loss"] for entry in entries if entry["kind"] == "held_out"),
      default=math.inf,
    )
    self.lowest = float(multihost.agree(lowest))
    self._events = None
    if multihost.is_first():
      # SummaryWriter would write in a thread, which a full disk kills.
      self._folder = local = folder / "tensorboard"
      if remote.is_remote(folder):
        local = remote.scratch() / "tensorboard"
      local.mkdir(exist_ok=True)
      with files.naming_errors(self._folder):
        self._events = event_file_writer.EventsWriter(str(local / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step + 1, session_log=start)  # voids later steps
        self._flush()

  def write(self, step: int, kind: str, measures: dict) -> None:
    """Appends an entry.

    Args:
      kind: 'train', 'held_out' or 'decoding'.
      measures: name -> number, or list of numbers.

    Raises:
      NotWritten: the disk is full, for example.
    """
    if kind == "held_out":
      self.lowest = min(self.lowest, measures["loss"])
    if self._events is None:
      return
    entry = {"step": step, "kind": kind, **measures}
    files.append(self._path, json.dumps(entry) + "\n")
    with files.naming_errors(self._folder):
      for name, value in measures.items():
        if not isinstance(value, list):
          self._add(step, summary=summary.scalar(f"{kind}/{name}", value))
          continue
        for i, part in enumerate(value, 1):
          if part is not None:
            self._add(step, summary=summary.scalar(f"{kind}/{name}/{i}", part))
      self._flush()

  def close(self) -> None:
    """Closes the event file, which is flushed already."""
    if self._events:
      with contextlib.suppress(OSError):
        self._events.close()
    files.flush()

  def _flush(self) -> None:
    self._events.flush()
    if remote.is_remote(self._folder):
      for file in (remote.scratch() / "tensorboard").iterdir():
        remote.mirror(file, self._folder / file.name)

  def _add(self, step: int, **content) -> None:
    self._events.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )
