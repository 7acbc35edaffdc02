"""The two forms of a learned drafter: what a round hands over, and training's.

They must not differ: a round drafts by the distributions that training computes
for the slots of the same root.
"""

import functools

import numpy as np
import pytest

from learned_kinds import (
  BATCH,
  K,
  differences,
  draft_head,
  speculate,
  stumbling,
  target,
  weights,
)
from specdec import acceptance, draft_shape, drafters
from specdec.testing import check_drafter
from specdec.types import Params

REJECTION = acceptance.rejection()
CHAIN = draft_shape.chain(K)
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2, 3])
EXACT = 1e-5  # of log-probabilities handed over and trained on


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


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


def check_equal(gaps, tolerance=EXACT):
  """The two forms of `forms_apart` are one."""
  assert set(gaps) == set(range(K))  # tokens of every level were evaluated
  assert len(gaps[0]) > 50 and len(gaps[1]) > 5
  for level, values in gaps.items():
    print(level, max(values), len(values))
    assert max(values) < tolerance, level


def check_apart(gaps, least=100 * EXACT):
  """They are far from being one: a planted mistake is seen."""
  worst = max(max(values) for values in gaps.values())
  print(f"{worst:.3g}")
  assert worst > least


@functools.cache
def uneven(kind, shape, full):
  return stumbling(drafter_of(kind, shape, full), shape.loops)


def check_of_a_transformer(kind, shape):
  """With rounds that are not drafted; chains draft every token."""
  model, params = target()
  full = shape.loops
  params = Params(params, weights(kind, full))
  make = functools.partial(uneven, kind, shape, full)
  stats = check_drafter(make, model, params, rules=(REJECTION,))
  if shape.spec.max_depth:
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()
    assert np.all(stats.rounds > stats.drafted[:, 0])
