"""EAGLE-3: reads several of the target's layers, predicts no hidden state.

Li et al., arXiv:2503.01840. Low, middle and high streams of the target are
fused into one; the head's own hidden state takes its place from the second
draft token on, as it does in training (unroll.py). Each stream passes a norm
before it is fused, as in EAGLE 3.1. Unlike the paper, embedding and stream are
fused to one width ahead of the layer instead of standing side by side in its
projections.
"""

import jax.numpy as jnp

from specdec.drafters.heads.draft_head import Blocks, Head, HeadModule, embedded
from specdec.models.transformer import Linear, RMSNorm


class Eagle3(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, W]."""

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
