"""The target's hidden states on disk, for drafters that are trained on them.

A row is run by the target when it is asked for first, and read from its file
ever after: by later epochs, by a resumed run, by another drafter that reads the
same layers of the same data. Kept in bfloat16. Invariant: a file appears under
its name whole, and the folder says of which target, data and layers it is.
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
from specdec.utils import files


class Cached(Sequences):
  """Batches {tokens [b, T+1], last [b, T, M], features ([b, T, M], ...)}.

  `last` is the stream that enters the target's final norm. The rows are fixed:
  every epoch cuts the text alike.
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
    """Claims the folder.

    Raises:
      ValueError: it holds states of another target, of other data or layers.
    """
    super().__init__(data.rows, data.seed)
    self._folder = folder
    files.claim(
      folder,
      {
        "target": fingerprint,
        "data": checksum(self.rows),
        "features": list(features),
      },
      shared=True,
    )

    num_layers = target.num_layers

    @jax.jit
    def run(params, tokens):
      wanted = (num_layers, *features)
      output, _ = target.apply(
        params, tokens[:, :-1], None, head=False, features=wanted
      )
      return jnp.stack(output.features, axis=1).astype(jnp.bfloat16)

    self._run = functools.partial(run, params)

  def batch(self, step: int, size: int) -> dict:
    """Sequences of a step, and the target's states of them."""
    place = np.arange(step * size, (step + 1) * size)
    chosen = [self._at(*divmod(int(p), self.count)) for p in place]
    tokens = self.rows[chosen]
    missing = [row for row in chosen if not self._path(row).is_file()]
    if missing:  # always so many at once: one program
      made = self._run(tokens)
      for row, states in zip(chosen, np.asarray(made)):
        if row in missing:
          self._write(row, states)
    states = jnp.asarray(np.stack([self._read(row) for row in chosen]))
    states = jax.lax.bitcast_convert_type(states, jnp.bfloat16)
    last, *features = states.astype(jnp.float32).swapaxes(0, 1)
    return {"tokens": tokens, "last": last, "features": tuple(features)}

  def _row(self, place: int) -> int:
    return int(place)

  def _path(self, row: int) -> Path:
    return self._folder / f"{row:08d}.npy"

  def _read(self, row: int) -> np.ndarray:
    return np.load(self._path(row))

  def _write(self, row: int, states: np.ndarray) -> None:
    values = states.view(np.uint16)
    files.replace_file(self._path(row), lambda file: np.save(file, values))
