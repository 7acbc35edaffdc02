"""Medusa: a head for each token ahead, all reading one hidden state.

Cai et al., arXiv:2401.10774. Head j sees what the target said before the
pending token and guesses the token j + 1 behind that one; no head knows what
the others chose. Heads are residual blocks before one vocabulary projection
that they share (in the paper each has its own, a copy of the target's).
"""

import jax
from flax import linen as nn

from specdec import sharding
from specdec.learned.cell import Cell, Head, cell_of
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Linear, Place, RMSNorm


class Medusa(nn.Module):
  """`Cell`'s functions; a stream is [B, T, W], the same all down a draft."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r = self.recipe
    self.norm = RMSNorm(r.norm_epsilon)
    self.down = Linear(r.width)
    self.residual = [Linear(r.width) for _ in range(r.levels)]
    self.head = Head(r, self.target, self.num_tokens)

  def read(self, output):
    return self.down(self.norm(output.hidden))

  def step(self, lent, tokens, streams, layers, view, depth, own):
    return streams, layers

  def score(self, lent, streams, depth):
    x = streams + jax.nn.silu(self.residual[depth](streams))
    return self.head(lent, x)


def medusa(recipe, target, ids=None, place=None) -> Cell:
  """Arguments as of `cell_of`."""
  return cell_of(Medusa, recipe, target, ids, place)
