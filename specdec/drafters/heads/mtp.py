"""Multi-token prediction as in DeepSeek-V3: one module, chained.

arXiv:2412.19437, section 2.2. The norms of the last hidden state and of the
next token's embedding are fused and pass one layer; the embedding is the
target's, and with head = 'shared' so is the head, as in the report. Further
draft tokens feed the module its own stream in the hidden state's place (the
report trains one level and chains it at inference; here training may unroll as
many as the head config says).
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


class Mtp(nn.Module):
  """`DraftHead`'s functions; hidden [B, T, M] stands for the target's."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.head_config
    self.hidden_norm = RMSNorm(r.norm_epsilon)
    self.embed_norm = RMSNorm(r.norm_epsilon)
    self.fuse = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.up = Linear(self.target.width)
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    return output.hidden

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    x = self.embed_norm(embedded(target_weights, tokens))
    x = jnp.concatenate([self.hidden_norm(hidden), x], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers

  def logits(self, target_weights, hidden, depth):
    return self.head(target_weights, hidden)


def mtp(head_config, target, ids=None, place=None) -> DraftHead:
  """Arguments as of `head_from_module`."""
  return head_from_module(Mtp, head_config, target, ids, place)
