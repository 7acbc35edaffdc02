"""Block verification: as good as any verifier of a single path can be."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import distribution
from distribution import CHAINS, EXACT, PLANTED, check, distributions, planted
from specdec import acceptance
from specdec.acceptance.distributions import remainder


def test_block_is_better_where_tokens_are_evaluated_one_by_one():
  draft, target = distributions(4, 3, seed=3)
  outcome = check(acceptance.block(), CHAINS[3], "none", draft, target)
  token = distribution.chain_acceptance(draft, target)
  assert outcome.accepted > token + 0.02


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

  def texts(length):
    return itertools.product(range(size), repeat=length)

  paths = list(texts(k))
  names = [("a", x, kept) for x in paths for kept in range(k + 1)]
  names += [("r", z) for kept in range(k + 1) for z in texts(kept + 1)]
  index = {name: i for i, name in enumerate(names)}
  rows, right = [], []

  def equation(entries, value):
    row = np.zeros(len(index))
    for name, factor in entries:
      row[index[name]] += factor
    rows.append(row)
    right.append(value)

  for x in paths:
    equation([(("a", x, kept), 1.0) for kept in range(k + 1)], drawn[x])
  for kept in range(k + 1):
    for prefix in texts(kept):
      after = [(("r", (*prefix, y)), 1.0) for y in range(size)]
      before = [(("a", x, kept), -1.0) for x in paths if x[:kept] == prefix]
      equation(after + before, 0.0)
  for z in texts(k + 1):
    entries = []
    for kept in range(k + 1):
      rest = [
        target_distributions[d][z[: d + 1]] for d in range(kept + 1, k + 1)
      ]
      entries.append((("r", z[: kept + 1]), float(np.prod(rest))))
    equation(entries, wanted[z])
  gain = [-float(name[2]) if name[0] == "a" else 0.0 for name in names]
  result = optimize.linprog(gain, A_eq=np.array(rows), b_eq=np.array(right))
  assert result.status == 0
  return -result.fun


@pytest.mark.parametrize("size, k", [(3, 1), (3, 2), (2, 3), (4, 2)])
def test_no_verifier_of_a_single_path_accepts_more(size, k):
  for seed in range(3):
    draft, target = distributions(size, k, seed=seed)
    outcome = check(acceptance.block(), CHAINS[k], "none", draft, target)
    best = best_single_path(draft, target)
    np.testing.assert_allclose(outcome.accepted, best, atol=2e-6)
    assert distribution.chain_acceptance(draft, target) <= best + 1e-9


@pytest.mark.parametrize("count", [2, 3])
def test_a_draft_that_stops_early_is_a_shorter_chain(count):
  draft, target = distributions(3, 3)
  outcome = check(
    acceptance.block(), CHAINS[3], "none", draft, target, count=count
  )
  expected = distribution.block_acceptance(draft[: count - 1], target)
  np.testing.assert_allclose(outcome.accepted, expected, atol=1e-6)


def planted_in_block(**changes) -> float:
  draft, target = distributions(4, 2, seed=6)
  rule = acceptance.block()._replace(**changes)
  return planted(CHAINS[2], "none", draft, target, rule)


def test_b13_the_tokenwise_residual_inside_block_is_caught():
  def residual(draft, target_log_probs, node):
    after = jnp.minimum(node + 1, len(target_log_probs) - 1)
    own = jnp.exp(target_log_probs[node])
    left = remainder(own, jnp.exp(draft.log_probs[after]))
    return jnp.where(node + 1 < draft.count, left, own)

  assert planted_in_block(residual=residual) > PLANTED
  assert planted_in_block() < EXACT


def test_tokenwise_accept_prob_under_the_traversal_of_block_is_caught():
  accept_prob = acceptance.rejection().accept_prob
  assert planted_in_block(accept_prob=accept_prob) > PLANTED


def test_stopping_block_at_its_first_failure_is_caught():
  assert planted_in_block(traversal="first_child") > PLANTED
