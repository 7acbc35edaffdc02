"""EAGLE: predicts the target's next hidden state, and the token from it.

Li et al., arXiv:2401.15077. A layer takes the hidden state before a token and
the token's embedding, and predicts the hidden state after it, which the
target's own head turns into a distribution and the next draft token takes as
its input. Unlike the paper: the state is the one after the target's final norm
(what its head reads); the layer may be narrower than the target; training feeds
it its own draft tokens for several levels and adds no noise to the states.
"""

import jax.numpy as jnp

from specdec.drafters.heads.draft_head import (
  Blocks,
  HeadModule,
  embedded,
  shared_score,
)
from specdec.models.transformer import Linear


class Eagle(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, M] is one of the target's."""

  def setup(self):
    self.fuse = Linear(self.head_config.width)
    self.blocks = Blocks(self.head_config, self.place)
    self.up = Linear(self.target.width)

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    x = jnp.concatenate([embedded(target_weights, tokens), hidden], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers

  def logits(self, target_weights, hidden, depth):
    return shared_score(target_weights, self.target, hidden)
