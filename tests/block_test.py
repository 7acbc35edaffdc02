"""Block drafters: every switch, from random weights.

That they are right is that a round drafts slot by slot what training computes
at the same anchor (trap B21), for every switch, and that the conformance kit
finds nothing.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from learned_kinds import (
  BATCH,
  BLOCKS,
  K,
  V,
  differences,
  draft_head,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  stumbling,
  target,
  weights,
)
from specdec import acceptance, draft_shape, draft_tree, drafters, step
from specdec.drafters.heads import block_serve, block_unroll
from specdec.drafters.heads import draft_head as draft_heads
from specdec.testing import check_drafter
from specdec.types import Params

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


@pytest.mark.parametrize(
  "kind, ids, shape, rules",
  [
    ("dflash", (), CHAIN, (REJECTION, acceptance.block())),
    ("dspark", (), draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow("dspark", (), CHAIN, None),
    slow("rnn", (0, 2), CHAIN, (REJECTION, acceptance.block())),
    slow("domino", (), draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow("jetspec", (1, 2), CHAIN, (REJECTION, acceptance.block())),
    slow("gated", (), draft_shape.chain(2), (REJECTION, acceptance.block())),
  ],
)
def test_by_enumeration(kind, ids, shape, rules):
  drafter, params = learned_kinds.of_table(kind, ids, shape)
  check_drafter(drafter, learned_kinds.TABLE, params, rules=rules)


@functools.cache
def uneven(kind, shape, full):
  return stumbling(drafter_of(kind, shape, full), shape.loops)


@pytest.mark.parametrize(
  "kind, shape",
  [
    ("dflash", CHAIN),
    ("windowed", DYNAMIC),
    ("rnn", TREE),
    slow("dspark", CHAIN),
    slow("domino", TREE),
    slow("dflash", draft_shape.chain(0)),
    slow("jetspec", draft_shape.chain(1)),
    slow("gated", draft_shape.static(draft_tree.parallel(2, 2), "iid")),
    slow("jetspec", DYNAMIC),
    slow("domino", CHAIN),
  ],
)
def test_of_a_transformer(kind, shape):
  """With rounds that are not drafted; chains draft every token."""
  model, params = target()
  full = shape.loops
  params = Params(params, weights(kind, full))
  make = functools.partial(uneven, kind, shape, full)
  stats = check_drafter(make, model, params, rules=(REJECTION,))
  if shape.spec.max_depth:
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()
    assert np.all(stats.rounds > stats.drafted[:, 0])
