"""Saves and restores the state of a training run, and exports its model.

Invariant: Orbax renames a checkpoint into place once it is complete, and it has
a checksum of its values, so that neither an interrupted write nor damaged files
are ever resumed from.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from specdec import checkpoints, multihost
from specdec.checkpoints import Tokenizer
from specdec.models.config import TransformerConfig
from specdec.training.loop import TrainState
from specdec.types import PyTree
from specdec.utils import files, orbax_errors, remote

KEPT = 2  # newest checkpoints to keep


class Checkpoints:
  """The `checkpoints` folder in a run's folder."""

  def __init__(self, folder: Path):
    self.folder = folder / "checkpoints"
    if not remote.is_remote(folder):  # which Orbax writes to by its name
      self.folder = self.folder.absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, cleanup_tmp_directories=True
      ),
      # Explicit, because damaged folders do not reveal their handler.
      item_handlers=ocp.StandardCheckpointHandler(),
    )

  def save(self, state: TrainState) -> None:
    """Starts writing a checkpoint; the state may be donated on return.

    Raises:
      NotWritten: the disk has too little space, or the previous checkpoint
        could not be written.
    """
    files.flush()  # a resumed run has every line up to its checkpoint
    # Checked first, since Orbax fails in the background after half of it.
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    files.check_space(self.folder, size, "a checkpoint")
    item = {"state": state, "checksum": np.array([checksum(state)], np.uint32)}
    with orbax_errors.named(self.folder):
      self._manager.save(int(state.step), args=ocp.args.StandardSave(item))

  def restore(self, like: TrainState) -> tuple[TrainState | None, list[str]]:
    """Restores the newest readable checkpoint.

    Newer, unreadable ones are moved to the sibling folder `unusable`.

    Args:
      like: a state with the shapes, dtypes and shardings to restore.

    Returns:
      The state, or None without checkpoints, and an error message for each
      unreadable checkpoint.

    Raises:
      ValueError: there are checkpoints, but none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    template = {"state": abstract, "checksum": np.zeros(1, np.uint32)}
    steps = sorted(self._manager.all_steps(), reverse=True)
    faults = []
    for step in steps:
      try:
        item = self._manager.restore(
          step, args=ocp.args.StandardRestore(template)
        )
        if checksum(item["state"]) != int(item["checksum"][0]):
          raise ValueError("its checksum is wrong")
      # Damaged files make the reader raise anything.
      except Exception as error:
        line = (str(error).splitlines() or [""])[0][:120]
        faults.append(f"checkpoint {step} is unusable ({line})")
        continue
      self._move_to_unusable(steps[: steps.index(step)])
      return item["state"], faults
    if faults:
      raise ValueError(
        f"no checkpoint under {self.folder} can be read: {'; '.join(faults)}"
      )
    return None, []

  def _move_to_unusable(self, steps: list[int]) -> None:
    unusable = self.folder.with_name("unusable")
    for step in steps if multihost.is_first() else ():
      files.make_folder(unusable)
      names = (unusable / f"{step}-{i}" for i in range(1000))
      free = next(name for name in names if not name.exists())
      files.move_folder(self.folder / str(step), free)
    if steps:
      multihost.agree(0)  # barrier: the others wait for the first
      self._manager.reload()

  def newest(self) -> int | None:
    """Returns the step of the newest checkpoint, after pending writes."""
    with orbax_errors.named(self.folder):
      self._manager.wait_until_finished()
    return self._manager.latest_step()

  def close(self) -> None:
    """Waits for pending writes and closes the folder."""
    with orbax_errors.named(self.folder):
      try:
        self._manager.wait_until_finished()
      finally:
        self._manager.close()


def export_model(
  path: Path,
  params: PyTree,
  config: TransformerConfig,
  tokenizer: Tokenizer,
  extra: Callable[[Path], None] | None = None,
) -> None:
  """Writes a checkpoint to the folder `path`, whole or not at all.

  Args:
    params: float32 weights, on any mesh.
    extra: writes what belongs to it into the folder it is called with, which
      holds the checkpoint already.
  """
  params = jax.tree.map(multihost.whole, params)
  if not multihost.is_first():
    return

  def write(folder: Path) -> None:
    checkpoints.save_safetensors(folder, params, config)
    tokenizer.save(folder, config.first_token)
    if extra is not None:
      extra(folder)

  files.replace_folder(path, write)


def checksum(tree: PyTree) -> int:
  """Returns the CRC-32 of all leaves, in tree order."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    total = zlib.crc32(np.ascontiguousarray(multihost.whole(leaf)), total)
  return total
