"""The curves of a run: lines of JSON, and the same for TensorBoard.

Invariant: after a resume the file holds every step once, as if the run had
never stopped. Of several processes the first writes.
"""

import contextlib
import json
import math
import time
from pathlib import Path

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from specdec import multihost
from specdec.utils import files


class Log:
  """`metrics.jsonl` and `tensorboard` in a run's folder.

  Attributes:
    lowest: held-out loss so far.
  """

  def __init__(self, folder: Path, step: int):
    """Opens the log of a run that stands at `step`; later entries are cut."""
    self._path = path = folder / "metrics.jsonl"
    kept = []
    if path.is_file():
      # A kill may have cut the last line short.
      lines = [x for x in path.read_text().splitlines() if x.endswith("}")]
      kept = [x for x in map(json.loads, lines) if x["step"] <= step]
    files.replace_text(
      path, "".join(json.dumps(entry) + "\n" for entry in kept)
    )
    lowest = min(
      (entry["loss"] for entry in kept if entry["kind"] == "held_out"),
      default=math.inf,
    )
    self.lowest = float(multihost.agree(lowest))
    self._board = None
    if multihost.is_first():
      # Its SummaryWriter writes in a thread, which a full disk ends.
      self._events = folder / "tensorboard"
      self._events.mkdir(exist_ok=True)
      with files.errors_name(self._events):
        self._board = event_file_writer.EventsWriter(
          str(self._events / "events")
        )
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step + 1, session_log=start)  # later ones are void
        self._board.flush()

  def write(self, step: int, kind: str, measures: dict) -> None:
    """One entry of numbers, or lists of them.

    `kind` is 'train', 'held_out' or 'decoding'.
    """
    if kind == "held_out":
      self.lowest = min(self.lowest, measures["loss"])
    if self._board is None:
      return
    entry = {"step": step, "kind": kind, **measures}
    files.append(self._path, json.dumps(entry) + "\n")
    with files.errors_name(self._events):
      for name, value in measures.items():
        if not isinstance(value, list):
          self._add(step, summary=summary.scalar(f"{kind}/{name}", value))
          continue
        for i, part in enumerate(value, 1):
          if part is not None:
            self._add(step, summary=summary.scalar(f"{kind}/{name}/{i}", part))
      self._board.flush()

  def close(self) -> None:
    """Closes the file of events; all of it is written already."""
    if self._board:
      with contextlib.suppress(OSError):
        self._board.close()

  def _add(self, step: int, **content) -> None:
    self._board.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )
