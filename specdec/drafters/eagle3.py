"""EAGLE-3: reads several of the target's layers, has no hidden state to hit.

Li et al., arXiv:2503.01840. Low, middle and high streams of the target are
fused into one; the drafter's own stream takes its place from the second guess
on, as it does in training (learned/unroll.py). Each stream passes a norm before
it is fused, as in EAGLE 3.1. Unlike the paper, embedding and stream are fused
to one width ahead of the layer instead of standing side by side in its
projections.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Blocks, Cell, Head, cell_of, embedded
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Eagle3(nn.Module):
  """`Cell`'s functions; a stream is [B, T, W]."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.stream_norms = [RMSNorm(r.norm_epsilon) for _ in r.features]
    self.gather = Linear(r.width)
    self.embed_norm = RMSNorm(r.norm_epsilon)
    self.norm = RMSNorm(r.norm_epsilon)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    pairs = zip(self.stream_norms, output.features)
    x = jnp.concatenate([norm(x) for norm, x in pairs], axis=-1)
    return self.gather(x)

  def step(self, lent, tokens, streams, layers, view, depth, own):
    x = self.embed_norm(embedded(lent, tokens))
    x = self.fuse(jnp.concatenate([x, self.norm(streams)], axis=-1))
    return self.blocks(streams + x, layers, view)

  def score(self, lent, streams, depth):
    return self.head(lent, streams)


def eagle3(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Eagle3, recipe, target, ids, place, recipe.features)
