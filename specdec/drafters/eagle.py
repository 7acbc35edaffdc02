"""EAGLE: guesses the target's next hidden state, and reads the token off it.

Li et al., arXiv:2401.15077. A layer takes the hidden state before a token and
the token's embedding, and predicts the hidden state after it, which the
target's own head turns into a law and the next guess takes as its input. Unlike
the paper: the state is the one after the target's final norm (what its head
reads); the layer may be narrower than the target; training feeds it its own
guesses for several levels and adds no noise to the states.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import (
  Blocks,
  Cell,
  cell_of,
  embedded,
  shared_score,
)
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place


class Eagle(nn.Module):
  """`Cell`'s functions; a stream is a hidden state of the target, [B, T, M]."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    self.fuse = Linear(self.recipe.width)
    self.blocks = Blocks(self.recipe, self.place)
    self.up = Linear(self.target.width)

  def read(self, output):
    return output.hidden

  def step(self, lent, tokens, streams, layers, view, depth, own):
    x = jnp.concatenate([embedded(lent, tokens), streams], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers

  def score(self, lent, streams, depth):
    return shared_score(lent, self.target, streams)


def eagle(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Eagle, recipe, target, ids, place)
