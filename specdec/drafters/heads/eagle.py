"""EAGLE: predicts the target's next hidden state, and the token from it.

Li et al., arXiv:2401.15077. A layer takes the hidden state before a token and
the token's embedding, and predicts the hidden state after it, which the
target's own head turns into a distribution and the next draft token takes as
its input. The state is the one after the target's final norm, which its head
reads. Unlike the paper, training feeds the layer its own states for several
levels and adds no noise to them, and in the compact layout it may be narrower
than the target.
"""

import jax.numpy as jnp
from flax import linen as nn

from specdec.drafters.heads.draft_head import (
  Blocks,
  Embed,
  HeadModule,
  attend_and_feed,
  embedded,
  shared_score,
)
from specdec.models.config import TransformerConfig
from specdec.models.linear import Linear
from specdec.models.transformer import Place


class Eagle(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, M] is one of the target's."""

  def setup(self):
    self.fuse = Linear(self.head_config.width)
    self.blocks = Blocks(self.head_config, self.place)
    self.up = Linear(self.target.width)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    x = jnp.concatenate([embedded(target_weights, tokens), hidden], axis=-1)
    x, layers = self.blocks(self.fuse(x), layers, view)
    return self.up(x), layers

  def logits(self, target_weights, hidden, depth):
    return shared_score(target_weights.head, self.target, hidden)


class _FirstLayer(nn.Module):
  """Decoder layer whose attention reads the stream without a norm."""

  config: TransformerConfig
  place: Place

  @nn.compact
  def __call__(self, x, layer, view):
    return attend_and_feed(self.config, self.place, x, x, layer, view)


class PublishedEagle(HeadModule):
  """EAGLE 1 and 2 as their authors' code has it; hidden [B, T, M]."""

  def setup(self):
    r = self.head_config
    self.embed_table = Embed(r, self.target)
    self.fuse = Linear(r.width, r.bias)
    self.layer_0 = _FirstLayer(r.layers, self.place)
    self.blocks = Blocks(r, self.place, first=1)

  def step(self, target_weights, tokens, hidden, layers, view, *rest):
    x = self.embed_table(target_weights, tokens)
    x = self.fuse(jnp.concatenate([x, hidden], axis=-1))
    x, first = self.layer_0(x, layers[0] if layers else None, view)
    x, others = self.blocks(x, layers[1:], view)
    return x, (first, *others)

  logits = Eagle.logits
