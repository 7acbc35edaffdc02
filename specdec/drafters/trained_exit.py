"""Early exit with something trained behind it, and last round's end fed back.

LayerSkip's exit (arXiv:2404.16710) reads a layer that was trained to be read;
here the target is left alone and what reads it is trained: a head (the
target's behind a map, or one of its own) and, with num_layers, decoder layers
in between (Kangaroo, arXiv:2404.18911). With `recycle` the hidden state that
the target ended the last round with joins in: what its upper layers knew. The
first E layers run as in drafters/early_exit.py, and are resumed likewise.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Blocks, Cell, Head, cell_of
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Exit(nn.Module):
  """`Cell`'s functions; a stream is [B, T, 2 W]: its own part, which the head
  reads, and what was recycled, which children inherit."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    if r.recycle:
      self.recycled = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    shape = (*output.hidden.shape[:2], self.recipe.width)
    none = jnp.zeros(shape, output.hidden.dtype)
    last = self.recycled(output.hidden) if self.recipe.recycle else none
    return jnp.concatenate([none, last], axis=-1)

  def step(self, lent, tokens, streams, layers, view, depth, own):
    last = streams[..., self.recipe.width :]
    x = self.down(self.norm(own)) + last
    if self.recipe.num_layers:
      x, layers = self.blocks(x, layers, view)
    return jnp.concatenate([x, last], axis=-1), layers

  def score(self, lent, streams, depth):
    return self.head(lent, streams[..., : self.recipe.width])


def trained_exit(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Exit, recipe, target, ids, place, (recipe.exit_layer,))
