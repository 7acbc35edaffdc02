"""A prophet: a small decoder that starts from the target's last hidden state.

ProphetNet's future n-gram (arXiv:2001.04063) as a drafter: its text begins with
a start made of what the target said last, then come the pending token and the
guesses. Its cache begins anew every round: it remembers nothing of the text but
what that hidden state holds, and its K/V are O(k).
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Blocks, Cell, Head, cell_of, embedded
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place


class Prophet(nn.Module):
  """`Cell`'s functions; what is read is [B, T, M], a stream [B, T, W]."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.start = Linear(r.width)
    self.down = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    return output.hidden

  def step(self, lent, tokens, streams, layers, view, depth, own):
    x = self.down(embedded(lent, tokens))
    if depth == 0:
      x = jnp.concatenate([self.start(streams), x], axis=1)
    x, layers = self.blocks(x, layers, view)
    return x[:, -tokens.shape[1] :], layers

  def score(self, lent, streams, depth):
    return self.head(lent, streams)


def prophet(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Prophet, recipe, target, ids, place)
