"""Mask slots: how a drafter runs all levels of a draft in one pass.

Behind the pending token, a round's root, stand masks for tokens that nobody has
drawn yet; slot j gives the distribution of the token j + 1 after the root. In
training (PARD, arXiv:2504.18583; P-EAGLE, arXiv:2602.01469) the slots of many
rounds stand after one text, which with them is a tree: a slot sees the text up
to its root and the slots of its own round before it, as it will in decoding.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_shape
from specdec.draft_shape import DraftShape
from specdec.models.attention import View
from specdec.types import Array, Context, Draft


class Slots(NamedTuple):
  """A text of T tokens, then the slots of rounds, level by level.

  Level 0 is the text itself: every token is a root.
  """

  root: Array  # [B, N] position of the round's root
  level: np.ndarray  # [N]

  @property
  def positions(self) -> Array:
    """[B, N] where everything stands in the text."""
    return self.root + jnp.asarray(self.level)[None]

  def tokens(self, text: Array, mask: int) -> Array:
    """Returns [B, N]: the text [B, T], and masks."""
    rest = self.root.shape[1] - text.shape[1]
    return jnp.pad(text, ((0, 0), (0, rest)), constant_values=mask)

  def view(self, start: int = 0) -> View:
    """Returns what everything sees; positions are counted from the text's.

    Args:
      start: tokens of the text that only see themselves, and are not seen.
    """
    root, level = self.root, jnp.asarray(self.level)[None]
    row, column = root[:, :, None], root[:, None]
    text = (level == 0) & (root >= start)
    before = level[:, None] <= level[:, :, None]
    seen = text[:, None] & (column <= row)
    seen |= (column == row) & before
    zero = jnp.zeros((root.shape[0],), jnp.int32)
    return View(zero, 0, self.positions, seen)

  def by_level(self, x: Array) -> list[Array]:
    """Returns the parts of x [B, N, ...] of each level."""
    ends = np.cumsum(np.bincount(self.level))[:-1]
    return jnp.split(x, ends, axis=1)


def behind(rounds: Array, counts: Sequence[int], size: int) -> Slots:
  """Returns the slots after a text of `size` tokens.

  Args:
    rounds: [B, R] positions of roots, R >= counts[0].
    counts: for each level from 1 on, how many of the first rounds have a slot
      there; never more than one level before.
  """
  text = jnp.broadcast_to(jnp.arange(size), (rounds.shape[0], size))
  parts = [text, *(rounds[:, :count] for count in counts)]
  level = np.repeat(np.arange(len(parts)), [x.shape[1] for x in parts])
  return Slots(jnp.concatenate(parts, axis=1), level)


def draw(
  context: Context,
  shape: DraftShape,
  logits: Array,
  finish: Callable[[Array], Array] = lambda logits: logits,
) -> Draft:
  """Draws a draft whose distributions depend on the level alone.

  Args:
    shape: of a chain or tree of D levels.
    logits: [B, D, n] of the tokens of each level.
    finish: [B, T, n] -> [B, T, V], of those of one level.
  """
  depth = shape.spec.max_depth

  def at(level) -> Array:
    one = jax.lax.dynamic_slice_in_dim(logits, level, 1, axis=1)
    return finish(one)

  if shape.loops:
    draft, _ = draft_shape.sample_chain(
      context,
      depth,
      lambda carry, token, node: (carry, at(node)[:, 0]),
      (),
      policy=shape.policy,
    )
    return draft

  def run(level, tokens, parents, first, need_logits):
    if not need_logits:
      return level, None
    return level + 1, at(level)

  tree, _ = shape.sample_tree(context, at(0)[:, 0], run, 1)
  return tree.draft
