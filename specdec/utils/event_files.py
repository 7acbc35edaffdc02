"""Scalars for TensorBoard, written without a thread."""

import contextlib
import time
from pathlib import Path

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2


class EventFile:
  """A file of scalars in a folder, which TensorBoard shows as one run."""

  def __init__(self, folder: Path, step: int):
    """Opens a file; what older ones there say of `step` and later is void."""
    folder.mkdir(parents=True, exist_ok=True)
    # SummaryWriter would write in a thread, which a full disk kills.
    self._events = event_file_writer.EventsWriter(str(folder / "events"))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(step, session_log=start)
    self.flush()

  def scalar(self, step: int, name: str, value: float) -> None:
    self._add(step, summary=summary.scalar(name, value))

  def flush(self) -> None:
    self._events.flush()

  def close(self) -> None:
    """Closes the file, which is flushed already."""
    with contextlib.suppress(OSError):
      self._events.close()

  def _add(self, step: int, **content) -> None:
    self._events.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )
