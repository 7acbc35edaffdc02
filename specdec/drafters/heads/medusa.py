"""Medusa: a head for each token ahead, all reading one hidden state.

Cai et al., arXiv:2401.10774. Head j reads the target's hidden state before
the pending token and drafts the token j + 1 after that one; no head depends on
what the others drafted. Heads are residual blocks before one vocabulary
projection that they share (in the paper each has its own, a copy of the
target's).
"""

import jax

from specdec.drafters.heads.draft_head import Head, HeadModule
from specdec.models.transformer import Linear, RMSNorm


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

  def step(
    self, target_weights, tokens, hidden, layers, view, depth, exit_hidden
  ):
    return hidden, layers

  def logits(self, target_weights, hidden, depth):
    x = hidden + jax.nn.silu(self.residual[depth](hidden))
    return self.head(target_weights, x)
