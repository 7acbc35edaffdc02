"""Medusa: a head for each token ahead, all reading one hidden state.

Cai et al., arXiv:2401.10774. Head j reads the target's hidden state before
the pending token and drafts the token j + 1 after that one; no head depends on
what the others drafted. Heads are residual blocks before a vocabulary
projection: in the published layout each has its own, in the compact one they
share it, behind a narrower hidden state.
"""

import jax

from specdec.drafters.heads.draft_head import Head, HeadModule
from specdec.models.linear import Linear, RMSNorm


class Medusa(HeadModule):
  """`DraftHead`'s functions; hidden [B, T, W] is shared by all levels."""

  def setup(self):
    r = self.head_config
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    self.residual = [Linear(r.width) for _ in range(r.levels)]
    self.head = Head(r, self.target, self.num_tokens)

  def encode(self, output):
    return self.down(self.norm(output.hidden))

  def step(self, target_weights, tokens, hidden, layers, *rest):
    return hidden, layers

  def logits(self, target_weights, hidden, depth):
    x = hidden + jax.nn.silu(self.residual[depth](hidden))
    return self.head(target_weights, x)


class PublishedMedusa(HeadModule):
  """Medusa as its authors' code has it; hidden [B, T, M], the target's."""

  def setup(self):
    r = self.head_config
    self.residual = [
      [Linear(r.width, bias=True) for _ in range(r.residual_layers)]
      for _ in range(r.levels)
    ]
    self.heads = [
      Head(r, self.target, self.num_tokens, normed=True)
      for _ in range(r.levels)
    ]

  step = Medusa.step

  def logits(self, target_weights, hidden, depth):
    for block in self.residual[depth]:
      hidden = hidden + jax.nn.silu(block(hidden))
    return self.heads[depth](target_weights, hidden)
