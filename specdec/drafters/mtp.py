"""Multi-token prediction as in DeepSeek-V3: one module, chained.

arXiv:2412.19437, section 2.2. The norms of the last hidden state and of the
next token's embedding are fused and pass one layer; the embedding is the
target's, and with head = 'shared' so is the head, as in the report. Further
guesses feed the module its own stream in the hidden state's place (the report
trains one level and chains it at inference; here training may unroll as many
as the recipe says).
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Blocks, Cell, Head, cell_of, embedded
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Mtp(nn.Module):
  """`Cell`'s functions; a stream stands for a hidden state, [B, T, M]."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.hidden_norm = RMSNorm(r.norm_epsilon)
    self.embed_norm = RMSNorm(r.norm_epsilon)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.up = Linear(self.target.width)
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    return output.hidden

  def step(self, lent, tokens, streams, layers, view, depth, own):
    x = self.embed_norm(embedded(lent, tokens))
    x = jnp.concatenate([self.hidden_norm(streams), x], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers

  def score(self, lent, streams, depth):
    return self.head(lent, streams)


def mtp(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Mtp, recipe, target, ids, place)
