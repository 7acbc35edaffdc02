"""A prophet: a small decoder that starts from the target's last hidden state.

ProphetNet's future n-gram (arXiv:2001.04063) as a drafter: its text begins with
a start computed from the target's last hidden state, then come the pending
token and the draft tokens. Its KV cache is empty at the start of every round:
all that it has of the text is that hidden state, and its KV are O(k).
"""

import jax.numpy as jnp

from specdec.drafters.heads.draft_head import Blocks, Head, HeadModule, embedded
from specdec.models.linear import Linear


class Prophet(HeadModule):
  """`DraftHead`'s functions; encoded [B, T, M], hidden [B, T, W]."""

  def setup(self):
    r = self.head_config
    self.start = Linear(r.width)
    self.down = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def step(self, target_weights, tokens, hidden, layers, view, depth, *rest):
    x = self.down(embedded(target_weights, tokens))
    if depth == 0:
      x = jnp.concatenate([self.start(hidden), x], axis=1)
    x, layers = self.blocks(x, layers, view)
    return x[:, -tokens.shape[1] :], layers
