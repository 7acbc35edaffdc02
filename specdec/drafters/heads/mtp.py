"""Multi-token prediction as in DeepSeek-V3: one module, chained.

arXiv:2412.19437, section 2.2. The norms of the last hidden state and of the
next token's embedding are fused and pass one layer; the embedding is the
target's, and with head = 'shared' so is the head, as in the report. Further
draft tokens feed the module its own stream in the hidden state's place (the
report trains one level and chains it at inference; here training may unroll as
many as the head config says). In the published layout the module has the
target's width and several details are options, as models differ in them.
"""

import functools

import jax.numpy as jnp

from specdec.drafters.heads.draft_head import (
  Blocks,
  Embed,
  Head,
  HeadModule,
  embedded,
)
from specdec.models.linear import Linear, RMSNorm


class Mtp(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, M] stands for the target's."""

  def setup(self):
    r = self.head_config
    self.hidden_norm = RMSNorm(r.norm_epsilon)
    self.embed_norm = RMSNorm(r.norm_epsilon)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.up = Linear(self.target.width)
    self.head = Head(r, self.target, self.num_tokens)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    x = self.embed_norm(embedded(target_weights, tokens))
    x = jnp.concatenate([self.hidden_norm(hidden), x], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers


class PublishedMtp(HeadModule):
  """MTP layers as models publish them; hidden [B, T, M]."""

  def setup(self):
    r = self.head_config
    norm = functools.partial(RMSNorm, r.norm_epsilon, r.norm_offset)
    self.hidden_norm, self.embed_norm, self.norm = norm(), norm(), norm()
    self.embed_table = Embed(r, self.target)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens, normed=True)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    parts = [
      self.embed_norm(self.embed_table(target_weights, tokens)),
      self.hidden_norm(hidden),
    ]
    if self.head_config.hidden_first:
      parts.reverse()
    x = self.fuse(jnp.concatenate(parts, axis=-1))
    x, layers = self.blocks(x, layers, view)
    return self.norm(x) if self.head_config.feeds_back_norm else x, layers

  def logits(self, target_weights, hidden, depth):
    x = hidden if self.head_config.feeds_back_norm else self.norm(hidden)
    return self.head(target_weights, x)
