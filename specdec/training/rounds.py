"""Which rounds of a text have mask slots in training, level by level.

Where a batch has addresses (data.Numbered) they are drawn, as a function of
(seed, step, row); elsewhere, as in evaluation, they are always the same ones.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec.drafters import mask_slots
from specdec.drafters.mask_slots import Slots
from specdec.training.data import draws
from specdec.training.draft_losses import TokenDrop
from specdec.types import Array


def slots_of(
  batch: dict[str, Array],
  levels: int,
  drop: TokenDrop,
  seed: int,
  start: int = 0,
) -> Slots:
  """Returns the slots after the text of a batch.

  Args:
    batch: tokens [B, T + 1], and the addresses step and row [B].
    levels: of a draft, the first one included; after every root with slots so
      many labels follow.
    start: first position that may be a root.

  Raises:
    ValueError: a sequence is shorter than a draft.
  """
  rows, size = batch["tokens"].shape
  places = size - levels - start  # the last column is only a label
  if places < 1:
    raise ValueError(
      f"a sequence of {size - 1} tokens; a draft has {levels} behind position "
      f"{start}"
    )
  counts = [
    max(1, int(places * max(drop.keep**level, drop.least)))
    for level in range(1, levels)
  ]

  def draw(key):
    return jax.random.permutation(key, places)

  if "step" in batch:
    order = draws(batch, seed, draw)
  else:
    order = np.random.default_rng(0).permutation(places)
    order = jnp.broadcast_to(order.astype(np.int32), (rows, places))
  return mask_slots.behind(start + order, counts, size - 1)
