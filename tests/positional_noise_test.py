"""Draft noise named by position alone: block verification must go red.

Only coupled decoding may name noise so (rule 4). Under the bug planted
here the draft tokens behind a refused one are made again in the next round.
"""

import jax.numpy as jnp
import pytest

from decode_distribution_test import SMALLEST_P, V, planted, whatever_the_past
from specdec import acceptance, noise
from specdec.types import Params

CAUGHT_P = 1e-60  # exact enumeration of the bug expects about 1e-120

# After 2 mostly 1, after 1 mostly 0. The draft draft tokens 2 far too often, so
# block keeps a 2 mostly where the draft token behind it is the 1 that belongs
# there.
TARGET = [[0.45, 0.35, 0.2], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]
# It ignores the past: the same noise is the same draft token, whatever was
# committed.
DRAFT = [0.1, 0.3, 0.6]
PARAMS = Params(
  {"table": jnp.broadcast_to(jnp.log(jnp.array(TARGET))[None], (V + 1, V, V))},
  whatever_the_past(DRAFT),
)


@pytest.fixture
def by_position(monkeypatch):
  """Uncoupled draft tokens reuse noise across rounds, as coupled ones may."""

  def draft(self, depth, node):
    del node
    return self._gumbel(noise.DRAFT, self.length - 1 + depth, 0)

  monkeypatch.setattr(noise.Noise, "draft", draft)


def test_positional_draft_noise_under_block_is_caught(by_position):
  """How much is kept depends on draft tokens that the next round makes again.

  A refused 2 says that no 1 was guessed behind it; by then the noise of that
  place is no longer fresh.
  """
  assert planted("model", PARAMS, acceptance.block()) < CAUGHT_P


def test_noise_of_its_own_round_passes_where_positional_noise_is_caught():
  assert planted("model", PARAMS, acceptance.block()) > SMALLEST_P


@pytest.mark.slow
def test_rejection_on_a_chain_does_not_mind_positional_draft_noise(by_position):
  """No bias, by enumeration to 1e-15; this sample has p = 0.61.

  Whether a draft token is kept depends on it and on those before it. The first
  refusal ends the round and the correction takes that place, so the next round
  starts at noise that has decided nothing. A rule that looks ahead loses this.
  """
  assert planted("model", PARAMS, acceptance.rejection()) > SMALLEST_P
