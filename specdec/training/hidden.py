"""Caches the target's hidden states on disk for training draft heads.

The target runs a sequence when it is first requested; later epochs, resumed
runs and other heads on the same layers read its states from a file, in
bfloat16. Invariant: a file is renamed into place once it is complete, and the
folder records its target, data and layers.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specdec.training.data import Sequences
from specdec.training.saving import checksum
from specdec.types import Model, PyTree
from specdec.utils import files, run_folder


def check(
  folder: Path,
  fingerprint: dict[str, str],
  features: Sequence[int],
  rows: np.ndarray | None = None,
  dtype: str = "float32",
) -> None:
  """Raises ValueError where `Cached` would; writes nothing.

  Args:
    rows: of the data; None: not known yet, and not compared.
    dtype: in which the target runs.
  """
  settings = _settings(fingerprint, features, rows, dtype)
  run_folder.check(folder, settings, ("data",) if rows is None else ())


def _settings(
  fingerprint: dict[str, str],
  features: Sequence[int],
  rows: np.ndarray | None,
  dtype: str,
) -> dict:
  """Returns what states depend on, as JSON values."""
  data = None if rows is None else checksum(rows)
  settings = {"target": fingerprint, "data": data, "features": list(features)}
  if dtype != "float32":  # older folders name none
    settings["dtype"] = dtype
  return settings


class Cached(Sequences):
  """Batches {tokens [b, T+1], last [b, T, M], features ([b, T, M], ...)}.

  `last` is the residual stream entering the target's final norm; it and the
  features are of the type of the target's weights. Every epoch has the same
  sequences, in another order.
  """

  def __init__(
    self,
    data: Sequences,
    target: Model,
    params: PyTree,
    features: Sequence[int],
    folder: Path,
    fingerprint: dict[str, str],
  ):
    """Claims the cache folder.

    Args:
      features: layers whose entering residual streams are cached.
      folder: shared by runs with the same target, data and features.
      fingerprint: of the target; see checkpoints.learned.fingerprint.

    Raises:
      ValueError: the folder holds states of another target, data or layers.
    """
    super().__init__(data.rows, data.seed)
    self._folder = folder
    self._dtype = jax.tree.leaves(params)[0].dtype
    settings = _settings(fingerprint, features, self.rows, self._dtype.name)
    run_folder.claim(folder, settings, shared=True)
    layers = (target.num_layers, *features)

    @jax.jit
    def run(params, tokens):
      output, _ = target.apply(
        params, tokens[:, :-1], None, head=False, features=layers
      )
      return jnp.stack(output.features, axis=1).astype(jnp.bfloat16)

    self._run = functools.partial(run, params)

  def batch(self, step: int, size: int) -> dict:
    """Returns the batch of a step with the target's hidden states."""
    rows = self._indices(step, size)
    tokens = self.rows[rows]
    missing = [row for row in rows if not self._path(row).is_file()]
    if missing:  # runs the whole batch, so that one program is compiled
      for row, states in zip(rows, np.asarray(self._run(tokens))):
        if row in missing:
          self._write(row, states)
    states = jnp.asarray(
      np.stack([files.load_array(self._path(row)) for row in rows])
    )
    states = jax.lax.bitcast_convert_type(states, jnp.bfloat16)
    last, *features = states.astype(self._dtype).swapaxes(0, 1)
    return {"tokens": tokens, "last": last, "features": tuple(features)}

  def _path(self, row: int) -> Path:
    return self._folder / f"{row:08d}.npy"

  def _write(self, row: int, states: np.ndarray) -> None:
    values = states.view(np.uint16)
    files.replace_file(self._path(row), lambda file: np.save(file, values))
