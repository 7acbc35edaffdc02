"""Block drafters: every switch, from random weights.

That they are right is that a round drafts slot by slot what training computes
at the same anchor (trap B21), for every switch, and that the conformance kit
finds nothing.
"""

import functools

import numpy as np
import pytest

from learned_kinds import (
  BATCH,
  BLOCKS,
  K,
  differences,
  draft_head,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  stumbling,
  target,
  weights,
)
from specdec import acceptance, draft_shape, drafters

COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()
CHAIN = draft_shape.chain(K)
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2, 3])
DYNAMIC = draft_shape.dynamic(2, 3, 5)
SLOW = pytest.mark.slow
EXACT = 1e-5  # of log-probabilities handed over and trained on


def slow(*case):
  return pytest.param(*case, marks=SLOW)


@functools.cache
def drafter_of(kind, shape=CHAIN, full=False):
  return drafters.from_head(draft_head(kind, full), target()[0], shape)


def forms_apart(kind, drafter):
  """[|log-probability handed over - trained on|] by level, of texts whose
  rounds are of any length and sometimes not drafted."""
  state = speculate(
    stumbling(drafter), REJECTION, weights(kind), np.ones(BATCH)
  )
  return differences(kind, False, state)


@pytest.mark.parametrize("kind", BLOCKS)
def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on(kind):
  gaps = forms_apart(kind, drafter_of(kind))
  assert set(gaps) == set(range(K))  # tokens of every level were evaluated
  assert len(gaps[0]) > 50 and len(gaps[1]) > 5
  for level, values in gaps.items():
    print(kind, level, max(values), len(values))
    assert max(values) < EXACT, level
