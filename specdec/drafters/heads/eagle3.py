"""EAGLE-3: reads several of the target's layers, predicts no hidden state.

Li et al., arXiv:2503.01840. Low, middle and high streams of the target are
fused into one; the head's own hidden state takes its place from the second
draft token on, as it does in training (unroll.py). Each stream passes a norm
before it is fused, as in EAGLE 3.1. Unlike the paper, embedding and stream are
fused to one width ahead of the layer instead of standing side by side in its
projections.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.drafters.heads.draft_head import (
  Blocks,
  DraftHead,
  Head,
  embedded,
  head_from_module,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Eagle3(nn.Module):
  """`DraftHead`'s functions; hidden [B, T, W]."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.head_config
    self.stream_norms = [RMSNorm(r.norm_epsilon) for _ in r.features]
    self.gather = Linear(r.width)
    self.embed_norm = RMSNorm(r.norm_epsilon)
    self.norm = RMSNorm(r.norm_epsilon)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    pairs = zip(self.stream_norms, output.features)
    x = jnp.concatenate([norm(x) for norm, x in pairs], axis=-1)
    return self.gather(x)

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    x = self.embed_norm(embedded(target_weights, tokens))
    x = self.fuse(jnp.concatenate([x, self.norm(hidden)], axis=-1))
    return self.blocks(hidden + x, layers, view)

  def logits(self, target_weights, hidden, depth):
    return self.head(target_weights, hidden)


def eagle3(head_config, target, ids=None, place=None) -> DraftHead:
  """Arguments as of `head_from_module`."""
  return head_from_module(
    Eagle3, head_config, target, ids, place, head_config.features
  )
