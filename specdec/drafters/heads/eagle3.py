"""EAGLE-3: reads several of the target's layers, predicts no hidden state.

Li et al., arXiv:2503.01840. Low, middle and high streams of the target are
fused into one; the head's own hidden state takes its place from the second
draft token on, as it does in training (unroll.py).

In the published layout the first layer's queries, keys and values read the
normed embedding and the normed hidden state next to each other. The compact
layout fuses the two to one width ahead of the layer, and its streams pass a
norm each before they are fused, as in EAGLE 3.1.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec.drafters.heads.draft_head import (
  Blocks,
  Embed,
  Head,
  HeadModule,
  attend_and_feed,
  embedded,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.transformer import Linear, Place, RMSNorm


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


class _FirstLayer(nn.Module):
  """Decoder layer whose attention reads embeddings and hidden states."""

  head_config: HeadConfig
  place: Place

  @nn.compact
  def __call__(self, embed, hidden, layer, view):
    r = self.head_config
    c = r.layers
    embed = RMSNorm(c.norm_epsilon, name="attention_norm")(embed)
    normed = RMSNorm(c.norm_epsilon, name="hidden_norm")(hidden)
    return attend_and_feed(
      c,
      self.place,
      normed if r.norm_before_residual else hidden,
      jnp.concatenate([embed, normed], axis=-1),
      layer,
      view,
    )


class PublishedEagle3(HeadModule):
  """EAGLE-3 as its authors and speculators have it; hidden [B, T, W]."""

  def setup(self):
    r = self.head_config
    count = {"none": 0, "joint": 1, "each": len(r.features)}[r.feature_norm]
    self.stream_norms = [RMSNorm(r.norm_epsilon) for _ in range(count)]
    self.gather = Linear(r.width)
    self.embed_table = Embed(r, self.target)
    self.layer_0 = _FirstLayer(r, self.place)
    self.blocks = Blocks(r, self.place, first=1)
    self.norm = RMSNorm(r.norm_epsilon)
    self.head = Head(r, self.target, self.num_tokens, normed=True)

  def encode(self, output):
    streams = output.features
    if self.head_config.feature_norm == "each":
      pairs = zip(self.stream_norms, streams)
      streams = [norm(x) for norm, x in pairs]
    x = jnp.concatenate(streams, axis=-1)
    if self.head_config.feature_norm == "joint":
      x = self.stream_norms[0](x)
    return self.gather(x)

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    x, first = self.layer_0(
      self.embed_table(target_weights, tokens),
      hidden,
      layers[0] if layers else None,
      view,
    )
    x, others = self.blocks(x, layers[1:], view)
    x = self.norm(x) if self.head_config.feeds_back_norm else x
    return x, (first, *others)

  def logits(self, target_weights, hidden, depth):
    x = hidden if self.head_config.feeds_back_norm else self.norm(hidden)
    return self.head(target_weights, x)
