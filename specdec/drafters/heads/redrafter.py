"""ReDrafter: a recurrent network fed the target's last hidden state.

Cheng et al. (Apple), arXiv:2403.09919. Its state starts empty and takes up the
embeddings of the pending token and of every draft token; the target's hidden
state and this state, next to each other, pass residual blocks and a vocabulary
projection. Apple's code drafts from the 50 likeliest tokens only; here all are
drafted, and acceptance rules hold for either.
"""

import jax
import jax.numpy as jnp

from specdec.drafters.heads.draft_head import Head, HeadModule, embedded
from specdec.models.linear import Linear


class ReDrafter(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, 2 M]: the target's, the state."""

  def setup(self):
    r, width = self.head_config, self.target.width
    if r.width != 2 * width:
      self.fuse = Linear(r.width, bias=True)
    if r.rnn:
      self.from_state = Linear(width, bias=True)
      self.from_token = Linear(width)
    self.residual = [
      Linear(r.width, bias=True) for _ in range(r.residual_layers)
    ]
    self.head = Head(r, self.target, self.num_tokens, normed=True)

  def encode(self, output):
    return jnp.concatenate(
      [output.hidden, jnp.zeros_like(output.hidden)], axis=-1
    )

  def step(self, target_weights, tokens, hidden, layers, *rest):
    context, state = jnp.split(hidden, 2, axis=-1)
    token = embedded(target_weights, tokens)
    if self.head_config.rnn:
      state = jax.nn.silu(self.from_token(token) + self.from_state(state))
    else:
      state = token + state
    return jnp.concatenate([context, state], axis=-1), layers

  def logits(self, target_weights, hidden, depth):
    x = hidden
    if self.head_config.width != hidden.shape[-1]:
      x = self.fuse(x)
    for block in self.residual:
      x = x + jax.nn.silu(block(x))
    return self.head(target_weights, x)
