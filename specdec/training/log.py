"""The curves of a run: lines of JSON, and the same for TensorBoard.

Invariant: after a resume the file holds every step once, as if the run had
never stopped. Of several processes the first writes.
"""

import json
import math
from pathlib import Path

from tensorboardX import SummaryWriter

from specdec import hosts
from specdec.run_folder import append, replace_text


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
    replace_text(path, "".join(json.dumps(entry) + "\n" for entry in kept))
    lowest = min(
      (entry["loss"] for entry in kept if entry["kind"] == "held_out"),
      default=math.inf,
    )
    self.lowest = float(hosts.agree(lowest))
    self._board = None
    if hosts.is_first():
      self._board = SummaryWriter(
        str(folder / "tensorboard"), purge_step=step + 1
      )

  def write(self, step: int, kind: str, measures: dict) -> None:
    """One entry of numbers, or lists of them.

    `kind` is 'train', 'held_out' or 'decoding'.
    """
    if kind == "held_out":
      self.lowest = min(self.lowest, measures["loss"])
    if self._board is None:
      return
    entry = {"step": step, "kind": kind, **measures}
    append(self._path, json.dumps(entry) + "\n")
    for name, value in measures.items():
      if not isinstance(value, list):
        self._board.add_scalar(f"{kind}/{name}", value, step)
        continue
      for i, part in enumerate(value, 1):
        if part is not None:
          self._board.add_scalar(f"{kind}/{name}/{i}", part, step)

  def close(self) -> None:
    """Flushes both."""
    if self._board:
      self._board.close()
