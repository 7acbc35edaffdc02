"""Block verification and naive match: exact, and as good as they can be."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import distribution
from acceptance_distribution_test import (
  CHAINS,
  DEEP,
  EXACT,
  PLANTED,
  SIBLINGS,
  WARPS,
  check,
  distributions,
  flat,
  planted,
)
from specdec import acceptance, decode
from specdec.acceptance.distributions import remainder


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("k", CHAINS)
def test_block_is_lossless_and_keeps_what_the_paper_says(k, warp):
  for seed in (k, k + 20):
    draft, target = distributions(4, k, warp, seed)
    found = check(acceptance.block(), CHAINS[k], "none", draft, target)
    expected = distribution.block_acceptance(draft, target)
    np.testing.assert_allclose(found.accepted, expected, atol=1e-6)
    token = distribution.chain_acceptance(draft, target)
    assert found.accepted >= token - 1e-6
    if k == 1 or warp == "greedy":
      np.testing.assert_allclose(found.accepted, token, atol=1e-6)


def test_block_is_better_where_tokens_are_evaluated_one_by_one():
  draft, target = distributions(4, 3, "baseline", seed=3)
  found = check(acceptance.block(), CHAINS[3], "none", draft, target)
  assert found.accepted > distribution.chain_acceptance(draft, target) + 0.02


def best_single_path(draft_distributions, target_distributions) -> float:
  """Expected accepted tokens of the best of all lossless verifiers of a chain.

  A linear program over a[x, l], the probability that x was drawn and l of its
  tokens are kept, and r[l][z], that z[:l] is kept and z[l] emitted after it.
  """
  k, size = len(draft_distributions), draft_distributions[0].shape[0]
  drawn, wanted = (
    distribution.text_distribution(draft_distributions),
    distribution.text_distribution(target_distributions),
  )
  paths = list(itertools.product(range(size), repeat=k))
  index, count = {}, 0
  for x in paths:
    for kept in range(k + 1):
      index["a", x, kept] = count
      count += 1
  for kept in range(k + 1):
    for z in itertools.product(range(size), repeat=kept + 1):
      index["r", z] = count
      count += 1
  rows, right = [], []

  def equation(entries, value):
    row = np.zeros(count)
    for name, factor in entries:
      row[index[name]] += factor
    rows.append(row)
    right.append(value)

  for x in paths:
    equation([(("a", x, kept), 1.0) for kept in range(k + 1)], drawn[x])
  for kept in range(k + 1):
    for prefix in itertools.product(range(size), repeat=kept):
      after = [(("r", (*prefix, y)), 1.0) for y in range(size)]
      before = [(("a", x, kept), -1.0) for x in paths if x[:kept] == prefix]
      equation(after + before, 0.0)
  for z in itertools.product(range(size), repeat=k + 1):
    entries = []
    for kept in range(k + 1):
      rest = [
        target_distributions[d][z[: d + 1]] for d in range(kept + 1, k + 1)
      ]
      entries.append((("r", z[: kept + 1]), float(np.prod(rest))))
    equation(entries, wanted[z])
  gain = np.zeros(count)
  for x in paths:
    for kept in range(k + 1):
      gain[index["a", x, kept]] = -kept
  found = optimize.linprog(gain, A_eq=np.array(rows), b_eq=np.array(right))
  assert found.status == 0
  return -found.fun


@pytest.mark.parametrize("size, k", [(3, 1), (3, 2), (2, 3), (4, 2)])
def test_no_verifier_of_a_single_path_keeps_more(size, k):
  for seed in range(3):
    draft, target = distributions(size, k, "baseline", seed)
    found = check(acceptance.block(), CHAINS[k], "none", draft, target)
    best = best_single_path(draft, target)
    np.testing.assert_allclose(found.accepted, best, atol=2e-6)
    token = distribution.chain_acceptance(draft, target)
    assert token <= best + 1e-9


@pytest.mark.parametrize("rubbish", [0.5, -np.inf, np.nan])
def test_nodes_past_count_never_matter(rubbish):
  draft, target = distributions(3, 3, "baseline")
  for count in range(1, 4):
    found = check(
      acceptance.block(),
      CHAINS[3],
      "none",
      draft,
      target,
      count=count,
      rubbish=rubbish,
    )
    if count > 1:
      expected = distribution.block_acceptance(draft[: count - 1], target)
      np.testing.assert_allclose(found.accepted, expected, atol=1e-6)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", ["none", "deterministic"])
def test_block_of_the_targets_own_draft_and_of_deterministic_children(
  kind, warp
):
  _, target = distributions(3, 3, warp)
  found = check(acceptance.block(), CHAINS[3], kind, target[:3], target)
  if kind == "none":
    np.testing.assert_allclose(found.accepted, 3, atol=1e-6)


@pytest.mark.parametrize(
  "draft, target",
  [
    ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),
    ([1, 0, 0, 0], [0, 0, 1, 0]),
    ([0, 0, 1, 0], [0, 0, 1, 0]),
    ([0.25, 0.25, 0.25, 0.25], [0, 1, 0, 0]),
    ([0, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]),
    ([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]),
  ],
)
@pytest.mark.parametrize("k", CHAINS)
def test_block_of_degenerate_distributions(k, draft, target):
  target = flat(*[target] * (k + 1))
  check(acceptance.block(), CHAINS[k], "none", flat(*[draft] * k), target)


def test_b13_the_tokenwise_residual_inside_block_is_caught():
  def residual(draft, target_log_probs, node):
    after = jnp.minimum(node + 1, len(target_log_probs) - 1)
    left = remainder(
      jnp.exp(target_log_probs[node]), jnp.exp(draft.log_probs[after])
    )
    own = jnp.exp(target_log_probs[node])
    return jnp.where(node + 1 < draft.count, left, own)

  draft, target = distributions(4, 2, "baseline", seed=6)
  wrong = acceptance.block()._replace(residual=residual)
  assert planted(CHAINS[2], "none", draft, target, wrong) > PLANTED
  assert planted(CHAINS[2], "none", draft, target, acceptance.block()) < EXACT


def test_tokenwise_coins_under_the_traversal_of_block_are_caught():
  rule = acceptance.block()._replace(
    accept_prob=acceptance.rejection().accept_prob
  )
  draft, target = distributions(4, 2, "baseline", seed=6)
  assert planted(CHAINS[2], "none", draft, target, rule) > PLANTED


def test_stopping_block_at_its_first_failure_is_caught():
  rule = acceptance.block()._replace(traversal="first_child")
  draft, target = distributions(4, 2, "baseline", seed=6)
  assert planted(CHAINS[2], "none", draft, target, rule) > PLANTED


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize(
  "parents, kind",
  [(CHAINS[1], "none"), (CHAINS[3], "none")] + [(DEEP, k) for k in SIBLINGS],
)
def test_naive_match_is_lossless_and_never_better(parents, kind, warp):
  depth = distribution.depths(parents).max()
  draft, target = distributions(3, depth, warp)
  found = check(acceptance.naive(), parents, kind, draft, target)
  other = check(acceptance.rejection(), parents, kind, draft, target)
  assert found.accepted <= other.accepted + 1e-6
  if parents == CHAINS[1]:
    expected = float(np.sum(draft[0] * target[0]))
    np.testing.assert_allclose(found.accepted, expected, atol=1e-6)


def test_block_refuses_trees():
  drafter = decode.NO_DRAFTER
  tree = drafter._replace(spec=drafter.spec._replace(parents=None))
  with pytest.raises(ValueError, match="evaluates chains"):
    decode.check_pair(tree.spec, acceptance.block())
