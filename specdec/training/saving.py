"""Checkpoints of a run: written whole or not at all, the newest good one used.

Invariant: a checkpoint appears under its name by one rename after it is
complete (Orbax), so a kill at any moment leaves the ones before it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specdec.training.loop import TrainState
from specdec.training.options import differences

KEPT = 2  # newest checkpoints


class Checkpoints:
  """The `checkpoints` folder of a run's folder."""

  def __init__(self, folder: Path):
    self.folder = (folder / "checkpoints").absolute()
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, cleanup_tmp_directories=True
      ),
    )

  def save(self, state: TrainState) -> None:
    """Begins to write; the state may be donated as soon as this returns."""
    self._manager.save(int(state.step), args=ocp.args.StandardSave(state))

  def restore(self, like: TrainState) -> tuple[TrainState | None, list[str]]:
    """The newest checkpoint that can be read, and what is wrong with newer.

    Args:
      like: a state whose shapes, types and placement are wanted.

    Raises:
      ValueError: there are checkpoints, and none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    steps = sorted(self._manager.all_steps(), reverse=True)
    faults = []
    for step in steps:
      try:
        state = self._manager.restore(
          step, args=ocp.args.StandardRestore(abstract)
        )
      # Whatever a damaged file makes the reader raise, the one before may do.
      except Exception as error:
        line = (str(error).splitlines() or [""])[0][:120]
        faults.append(f"checkpoint {step} is unusable ({line})")
        continue
      for bad in steps[: steps.index(step)]:
        shutil.rmtree(self.folder / str(bad))
      self._manager.reload()
      return state, faults
    if faults:
      raise ValueError(
        f"no checkpoint under {self.folder} can be read: {'; '.join(faults)}"
      )
    return None, []

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()


def claim(folder: Path, settings: dict[str, Any]) -> None:
  """Makes `folder` the folder of the run that `settings` define.

  Raises:
    ValueError: it holds a run with other settings; they are listed.
  """
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "run.json"
  settings = json.loads(json.dumps(settings))  # tuples as they will be read
  if path.is_file():
    found = differences(json.loads(path.read_text()), settings)
    if found:
      raise ValueError(
        f"{folder} holds a run with other settings ({'; '.join(found)}); take "
        "another folder, or the same settings to go on with it"
      )
  path.write_text(json.dumps(settings, indent=1) + "\n")
