"""Hydra: Medusa's heads, each told what those before it chose.

Ankner et al., arXiv:2402.05109. Head j reads the hidden state before the
pending token, that token's embedding and the embeddings of the j guesses
behind it. One vocabulary projection is shared by all heads.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Cell, Head, cell_of, embedded
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Hydra(nn.Module):
  """`Cell`'s functions; a stream is [B, T, (1 + levels) W]: the hidden state's
  part, then one for each token of the path, zero where there is none yet."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    self.token = Linear(r.width)
    self.residual = [Linear(r.width) for _ in range(r.levels)]
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    x = self.down(self.norm(output.hidden))
    return jnp.pad(x, ((0, 0), (0, 0), (0, self.recipe.levels * x.shape[-1])))

  def step(self, lent, tokens, streams, layers, view, depth, own):
    first = (1 + depth) * self.recipe.width
    x = self.token(embedded(lent, tokens))
    return jax.lax.dynamic_update_slice_in_dim(streams, x, first, 2), layers

  def score(self, lent, streams, depth):
    width = self.recipe.width
    seen = streams[..., : (2 + depth) * width]
    x = streams[..., :width] + jax.nn.silu(self.residual[depth](seen))
    return self.head(lent, x)


def hydra(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Hydra, recipe, target, ids, place)
