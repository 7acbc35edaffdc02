"""The linear program: what no lossless rule can beat, and which reach it."""

import itertools

import numpy as np
import pytest

import distribution
from distribution import CHAINS, DEEP, PAIR, SIBLINGS, TRIPLE, distributions
from specdec import acceptance, draft_tree
from specdec.testing import enumeration
from specdec.testing.optimum import accepted_at_most

LOSSLESS = {
  name: getattr(acceptance, name)()
  for name in ("rejection", "naive", "kseq", "block", "traversal")
}


@pytest.mark.parametrize("warp", distribution.WARPS)
@pytest.mark.parametrize("k", CHAINS)
def test_block_verification_reaches_it_on_one_path(k, warp):
  for seed in range(3):
    draft, target = distributions(3, k, warp, seed)
    for count in (k + 1, k):
      drafts = enumeration.drafts("none", CHAINS[k], draft, count=count)
      best = accepted_at_most(drafts, target, count=count)
      block = distribution.block_acceptance(draft[: count - 1], target)
      np.testing.assert_allclose(best, block, atol=1e-6)


def least_cut(drafts, target) -> float:
  """Of one level: the smallest cut between sets of children and their tokens,
  the dual of the best transport of one token."""
  tokens = range(len(target[0]))
  sets = [set(row[1:].tolist()) for row in drafts.tokens]
  cuts = []
  for size in range(len(tokens) + 1):
    for inside in itertools.combinations(tokens, size):
      outside = [not found <= set(inside) for found in sets]
      cuts.append(target[0][list(inside)].sum() + drafts.weight[outside].sum())
  return min(cuts)


@pytest.mark.parametrize("kind", SIBLINGS)
@pytest.mark.parametrize("parents", [PAIR, TRIPLE])
def test_of_one_level_it_is_the_best_transport(parents, kind):
  for seed in range(3):
    draft, target = distributions(4, 1, seed=seed)
    drafts = enumeration.drafts(kind, parents, draft)
    best = accepted_at_most(drafts, target)
    np.testing.assert_allclose(best, least_cut(drafts, target), atol=1e-6)


@pytest.mark.parametrize("kind", SIBLINGS)
@pytest.mark.parametrize(
  "parents", [PAIR, DEEP, draft_tree.parallel(2, 2).tolist()]
)
def test_no_lossless_rule_accepts_more(parents, kind):
  depth = distribution.max_depth(parents)
  for warp in ("baseline", "top_p"):
    draft, target = distributions(3, depth, warp)
    drafts = enumeration.drafts(kind, parents, draft)
    best = accepted_at_most(drafts, target)
    accepted = {
      name: enumeration.emitted(rule, drafts, target).accepted
      for name, rule in LOSSLESS.items()
      if kind in rule.siblings and not rule.chains_only
    }
    for value in accepted.values():
      assert value <= best + 1e-6
    assert accepted["traversal"] >= accepted["rejection"] - 1e-6


def test_a_draft_of_the_target_itself_is_accepted_whole():
  _, target = distributions(3, 3)
  drafts = enumeration.drafts("none", CHAINS[3], target)
  np.testing.assert_allclose(accepted_at_most(drafts, target), 3, atol=1e-6)


def test_a_lossy_rule_may_accept_more():
  draft, target = distributions(3, 2)
  drafts = enumeration.drafts("none", CHAINS[2], draft)
  best = accepted_at_most(drafts, target)
  for rule in (acceptance.lenience(0.3), acceptance.relaxed(3, 1.0)):
    assert enumeration.emitted(rule, drafts, target).accepted > best + 0.01
