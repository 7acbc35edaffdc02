"""A trained early exit, which may feed back the last hidden state.

LayerSkip's exit (arXiv:2404.16710) reads a layer that was trained to be read;
here the target is left alone and what reads it is trained: a head (the
target's behind a map, or one of its own) and, with num_layers, decoder layers
in between (Kangaroo, arXiv:2404.18911). With `feeds_back_hidden` the last
hidden state of the round before is an input: what the upper layers computed.
The first E layers run as in drafters/early_exit.py, and are resumed likewise.
"""

import jax.numpy as jnp

from specdec.drafters.heads.draft_head import Blocks, Head, HeadModule
from specdec.models.linear import Linear, RMSNorm


class Exit(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, 2 W]: what the vocabulary projection
  reads, and the state fed back, which children inherit."""

  def setup(self):
    r = self.head_config
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    if r.feeds_back_hidden:
      self.recycled = Linear(r.width)
    self.blocks = Blocks(r, self.place)
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    shape = (*output.hidden.shape[:2], self.head_config.width)
    last = none = jnp.zeros(shape, output.hidden.dtype)
    if self.head_config.feeds_back_hidden:
      last = self.recycled(output.hidden)
    return jnp.concatenate([none, last], axis=-1)

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    last = hidden[..., self.head_config.width :]
    x = self.down(self.norm(exit_hidden)) + last
    if self.head_config.num_layers:
      x, layers = self.blocks(x, layers, view)
    return jnp.concatenate([x, last], axis=-1), layers

  def logits(self, target_weights, hidden, depth):
    return self.head(target_weights, hidden[..., : self.head_config.width])
