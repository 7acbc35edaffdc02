"""Hydra: Medusa's heads, each of which reads the tokens drafted before it.

Ankner et al., arXiv:2402.05109. Head j reads the hidden state before the
pending token, that token's embedding and the embeddings of the j draft tokens
after it. One vocabulary projection is shared by all heads.
"""

import jax
import jax.numpy as jnp

from specdec.drafters.heads.draft_head import Head, HeadModule, embedded
from specdec.models.linear import Linear, RMSNorm


class Hydra(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, (1 + levels) W]: the hidden state's
  part, then one for each token of the path, zero where there is none yet."""

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

  def step(self, target_weights, tokens, hidden, layers, view, depth, *rest):
    first = (1 + depth) * self.head_config.width
    x = self.token(embedded(target_weights, tokens))
    return jax.lax.dynamic_update_slice_in_dim(hidden, x, first, 2), layers

  def logits(self, target_weights, hidden, depth):
    width = self.head_config.width
    seen = hidden[..., : (2 + depth) * width]
    x = hidden[..., :width] + jax.nn.silu(self.residual[depth](seen))
    return self.head(target_weights, x)
