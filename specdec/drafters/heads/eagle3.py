"""EAGLE-3: reads several of the target's layers, predicts no hidden state.

Li et al., arXiv:2503.01840. Low, middle and high streams of the target are
fused into one; the head's own hidden state takes its place from the second
draft token on, as it does in training (unroll.py).

In the published layout the first layer's queries, keys and values read the
normed embedding and the normed hidden state next to each other. The compact
layout fuses the two to one width ahead of the layer, and its streams pass a
norm each before they are fused, as in EAGLE 3.1.

P-EAGLE (arXiv:2602.01469) drafts all levels in one pass: what is not drawn yet
is a mask token, and the streams that nobody has computed are learned. A token
below 0 is such a mask.
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
from specdec.models.linear import Linear, RMSNorm
from specdec.models.transformer import Place
from specdec.types import ModelOutput


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

  def embed_tokens(self, target_weights, tokens):
    return embedded(target_weights, tokens)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    x = self.embed_norm(self.embed_tokens(target_weights, tokens))
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

  def embed_tokens(self, target_weights, tokens):
    return self.embed_table(target_weights, tokens)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    x, first = self.layer_0(
      self.embed_tokens(target_weights, tokens),
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


class _Masks(HeadModule):
  """What P-EAGLE adds to either layout; `hidden` of a mask is not read."""

  def setup(self):
    super().setup()
    r, size = self.head_config, self.target.width
    init = nn.initializers.normal(0.02)
    count = len(r.features)
    self.mask_hidden = self.param("mask_hidden", init, (count * size,))
    if r.mask_token < 0:
      width = r.width if r.embed == "own" else size
      self.mask = self.param("mask", init, (width,))

  def embed_tokens(self, target_weights, tokens):
    mask_token = self.head_config.mask_token
    known = tokens >= 0
    x = super().embed_tokens(
      target_weights, jnp.where(known, tokens, max(mask_token, 0))
    )
    if mask_token >= 0:
      return x
    return jnp.where(known[..., None], x, self.mask.astype(x.dtype))

  def step(self, target_weights, tokens, hidden, *rest):
    count = len(self.head_config.features)
    streams = jnp.split(self.mask_hidden[None, None], count, axis=-1)
    mask = self.encode(ModelOutput(None, streams[0], tuple(streams)))
    masked = tokens[..., None] < 0
    hidden = jnp.where(masked, mask.astype(hidden.dtype), hidden)
    return super().step(target_weights, tokens, hidden, *rest)


class PEagle(_Masks, Eagle3):
  """EAGLE-3 as a parallel drafter."""


class PublishedPEagle(_Masks, PublishedEagle3):
  """The same in the published layout."""
