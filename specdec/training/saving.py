"""Checkpoints of a run: written whole or not at all, the newest good one used.

Invariant: a checkpoint appears under its name by one rename after it is
complete (Orbax), and carries a checksum of its values, so neither a kill nor a
damaged disk is ever trained on.
"""

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from specdec import multihost
from specdec.training.loop import TrainState
from specdec.types import PyTree
from specdec.utils import files

KEPT = 2  # newest checkpoints
# What errors of TensorStore say that are no OSError.
_SYSTEM = re.compile(
  "no space left|RESOURCE_EXHAUSTED|disk quota|permission|file too large|"
  "read-only file system|input/output error",
  re.IGNORECASE,
)


class Checkpoints:
  """The `checkpoints` folder of a run's folder."""

  def __init__(self, folder: Path):
    self.folder = (folder / "checkpoints").absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, cleanup_tmp_directories=True
      ),
      # Named, so that it need not be guessed from folders that may be damaged.
      item_handlers=ocp.StandardCheckpointHandler(),
    )

  def save(self, state: TrainState) -> None:
    """Begins to write; the state may be donated as soon as this returns.

    Raises:
      NotWritten: the disk has no room, or the one before could not be written.
    """
    # Asked first: Orbax fails in the background, after half a checkpoint.
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    free = shutil.disk_usage(self.folder).free
    if size > free:
      raise files.NotWritten(
        f"{self.folder} could not be written: a checkpoint takes "
        f"{size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
      )
    item = {"state": state, "checksum": np.array([checksum(state)], np.uint32)}
    with self._errors_named():
      self._manager.save(int(state.step), args=ocp.args.StandardSave(item))

  def restore(self, like: TrainState) -> tuple[TrainState | None, list[str]]:
    """The newest checkpoint that can be read, and what is wrong with newer.

    Those are moved into the folder `unusable` beside this one.

    Args:
      like: a state whose shapes, types and placement are wanted.

    Raises:
      ValueError: there are checkpoints, and none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    wanted = {"state": abstract, "checksum": np.zeros(1, np.uint32)}
    steps = sorted(self._manager.all_steps(), reverse=True)
    faults = []
    for step in steps:
      try:
        item = self._manager.restore(
          step, args=ocp.args.StandardRestore(wanted)
        )
        if checksum(item["state"]) != int(item["checksum"][0]):
          raise ValueError("its checksum is wrong")
      # Whatever a damaged file makes the reader raise, the one before may do.
      except Exception as error:
        line = (str(error).splitlines() or [""])[0][:120]
        faults.append(f"checkpoint {step} is unusable ({line})")
        continue
      self._put_aside(steps[: steps.index(step)])
      return item["state"], faults
    if faults:
      raise ValueError(
        f"no checkpoint under {self.folder} can be read: {'; '.join(faults)}"
      )
    return None, []

  def _put_aside(self, steps: list[int]) -> None:
    aside = self.folder.with_name("unusable")
    for step in steps if multihost.is_first() else ():
      aside.mkdir(exist_ok=True)
      names = (aside / f"{step}-{i}" for i in range(1000))
      free = next(name for name in names if not name.exists())
      (self.folder / str(step)).rename(free)
    if steps:
      multihost.agree(0)  # all wait for the first
      self._manager.reload()

  def newest(self) -> int | None:
    """Step of the newest checkpoint, waiting for one that is being written."""
    with self._errors_named():
      self._manager.wait_until_finished()
    return self._manager.latest_step()

  def close(self) -> None:
    """Waits until everything is written."""
    with self._errors_named():
      try:
        self._manager.wait_until_finished()
      finally:
        self._manager.close()

  @contextlib.contextmanager
  def _errors_named(self) -> Iterator[None]:
    """Raises NotWritten where Orbax's writers met an error of the system."""
    try:
      yield
    except Exception as error:
      code = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore's
      if not (isinstance(error, OSError) or code or _SYSTEM.search(str(error))):
        raise
      line = (str(error).splitlines() or [type(error).__name__])[0][:300]
      reason = os.strerror(int(code[1])) if code else line
      raise files.NotWritten(
        f"{self.folder} could not be written: {reason}"
      ) from error


def checksum(tree: PyTree) -> int:
  """CRC-32 of every value, in the order of the tree."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    total = zlib.crc32(np.ascontiguousarray(multihost.whole(leaf)), total)
  return total
