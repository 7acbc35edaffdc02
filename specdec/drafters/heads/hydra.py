"""Hydra: Medusa's heads, each of which reads the tokens drafted before it.

Ankner et al., arXiv:2402.05109. Head j reads the hidden state before the
pending token, that token's embedding and the embeddings of the j draft tokens
behind it. One vocabulary projection is shared by all heads.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.drafters.heads.draft_head import (
  DraftHead,
  Head,
  embedded,
  head_from_module,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Hydra(nn.Module):
  """`DraftHead`'s functions; hidden [B, T, (1 + levels) W]: the hidden state's
  part, then one for each token of the path, zero where there is none yet."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.head_config
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    self.token = Linear(r.width)
    self.residual = [Linear(r.width) for _ in range(r.levels)]
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    x = self.down(self.norm(output.hidden))
    return jnp.pad(
      x, ((0, 0), (0, 0), (0, self.head_config.levels * x.shape[-1]))
    )

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    first = (1 + depth) * self.head_config.width
    x = self.token(embedded(target_weights, tokens))
    return jax.lax.dynamic_update_slice_in_dim(hidden, x, first, 2), layers

  def logits(self, target_weights, hidden, depth):
    width = self.head_config.width
    seen = hidden[..., : (2 + depth) * width]
    x = hidden[..., :width] + jax.nn.silu(self.residual[depth](seen))
    return self.head(target_weights, x)


def hydra(head_config, target, ids=None, place=None) -> DraftHead:
  """Arguments as of `head_from_module`."""
  return head_from_module(Hydra, head_config, target, ids, place)
