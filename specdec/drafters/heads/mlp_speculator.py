"""IBM's MLP speculator: an MLP a draft token, fed the token before it.

Wertheimer et al., arXiv:2404.19124. The first MLP reads the target's last
hidden state and the pending token; each further one reads the hidden state of
the one before and the token that was drafted from it.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec.drafters.heads.draft_head import Head, HeadModule
from specdec.models.experts import Weight
from specdec.models.layouts import look_up
from specdec.models.linear import Linear

EPSILON = 1e-6


def _normalized(x: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)


class _Norm(nn.Module):
  """Root-mean-square norm with a scale and a shift."""

  @nn.compact
  def __call__(self, x):
    shape = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, shape)
    bias = self.param("bias", nn.initializers.zeros, shape)
    return _normalized(x) * scale[None, None] + bias[None, None]


class MlpSpeculator(HeadModule):
  """`DraftHead`'s functions; encoded [B, T, M], hidden [B, T, W]."""

  def setup(self):
    r = self.head_config
    count = 1 if r.tied else r.levels
    shape = self.target.vocab_size, r.width
    self.embed_table = [Weight(shape) for _ in range(count)]
    self.project = [
      Linear(r.width) for _ in range(min(2, r.levels) if r.tied else count)
    ]
    self.norm = [_Norm() for _ in range(count)]
    self.head = [
      Head(r, self.target, self.num_tokens, normed=True) for _ in range(count)
    ]
    state = 0.5 ** (0.5 / r.levels)  # shares of hidden state and embedding
    self.embed_scale = ((1 - state**2) * r.width / 2) ** 0.5 / state

  def encode(self, output):
    if not self.head_config.scale_input:
      return output.hidden
    return _normalized(output.hidden) / 2**0.5

  def step(self, target_weights, tokens, hidden, layers, view, depth, *rest):
    stage = 0 if self.head_config.tied else depth
    x = self.project[min(depth, len(self.project) - 1)](hidden)
    table = self.embed_table[stage](jnp.float32)
    x = x + self.embed_scale * look_up(table, tokens)
    return jax.nn.gelu(self.norm[stage](x), approximate=False), layers

  def logits(self, target_weights, hidden, depth):
    stage = 0 if self.head_config.tied else depth
    return self.head[stage](target_weights, hidden)
