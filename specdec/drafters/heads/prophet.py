"""A prophet: a small decoder that starts from the target's last hidden state.

ProphetNet's future n-gram (arXiv:2001.04063) as a drafter: its text begins with
a start computed from the target's last hidden state, then come the pending
token and the draft tokens. Its KV cache is empty at the start of every round:
all that it has of the text is that hidden state, and its KV are O(k).
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
from specdec.models.transformer import Linear, Place


class Prophet(nn.Module):
  """`DraftHead`'s functions; encoded [B, T, M], hidden [B, T, W]."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.head_config
    self.start = Linear(r.width)
    self.down = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    return output.hidden

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    x = self.down(embedded(target_weights, tokens))
    if depth == 0:
      x = jnp.concatenate([self.start(hidden), x], axis=1)
    x, layers = self.blocks(x, layers, view)
    return x[:, -tokens.shape[1] :], layers

  def logits(self, target_weights, hidden, depth):
    return self.head(target_weights, hidden)


def prophet(head_config, target, ids=None, place=None) -> DraftHead:
  """Arguments as of `head_from_module`."""
  return head_from_module(Prophet, head_config, target, ids, place)
