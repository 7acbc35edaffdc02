"""k-SEQ: exact, near the best that several draws allow, and easily broken."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from distribution import (
  EXACT,
  PAIR,
  PLANTED,
  TRIPLE,
  check,
  distributions,
  planted,
)
from specdec import acceptance, draft_tree, sampling
from specdec.noise import Noise, row_keys
from specdec.step import traverse_draft
from specdec.types import Draft

kseq_file = sys.modules["specdec.acceptance.kseq"]

RULE = acceptance.kseq()
THREE_CHAINS = draft_tree.parallel(3, 2)


def kept_at_best(drawn, target, num_draws) -> float:
  """P(one of the draws is kept) at the root, by another solver."""

  def beta(rho):
    return np.minimum(target / rho, drawn).sum()

  def kept(rho):
    return 1 - (1 - beta(rho)) ** num_draws

  def excess(rho):
    return kept(rho) - rho * beta(rho)

  if excess(1.0) <= 0:
    return kept(1.0)
  return kept(optimize.brentq(excess, 1.0, num_draws, xtol=1e-14))


def best_coupling(drawn, target, num_draws) -> float:
  """Largest P(the emitted token is among i.i.d. draws), a linear program."""
  size = len(target)
  draws = list(itertools.product(range(size), repeat=num_draws))
  gain = [-float(y in x) for x in draws for y in range(size)]
  rows = np.zeros((len(draws) + size, len(gain)))
  for i in range(len(draws)):
    rows[i, i * size : (i + 1) * size] = 1
  for y in range(size):
    rows[len(draws) + y, y::size] = 1
  right = [np.prod(drawn[list(x)]) for x in draws]
  result = optimize.linprog(gain, A_eq=rows, b_eq=np.array([*right, *target]))
  assert result.status == 0
  return -result.fun


@pytest.mark.parametrize("num_draws", [2, 3, 4])
def test_siblings_are_accepted_as_often_as_its_paper_says(num_draws):
  parents = draft_tree.parallel(num_draws, 1)
  for seed in range(3):
    draft, target = distributions(4, 1, seed=seed)
    accepted = check(RULE, parents, "iid", draft, target).accepted
    expected = kept_at_best(draft[0], target[0], num_draws)
    np.testing.assert_allclose(accepted, expected, atol=3e-6)
    best = best_coupling(draft[0], target[0], num_draws)
    assert (1 - 1 / np.e) * best <= accepted <= best + 1e-6


@pytest.mark.parametrize(
  "rule", [acceptance.rejection(), RULE, acceptance.naive()]
)
def test_chains_that_begin_alike_are_worth_joining(rule):
  gains = []
  for seed in range(4):
    draft, target = distributions(3, 2, seed=seed)
    apart = check(rule, THREE_CHAINS, "iid", draft, target, joined=False)
    joined = check(rule, THREE_CHAINS, "iid", draft, target)
    gains.append(joined.accepted - apart.accepted)
  assert min(gains) > 0.005


# Planted bugs.


def test_rho_of_one_is_caught(monkeypatch):
  draft, target = distributions(4, 1, seed=6)
  for parents in (PAIR, TRIPLE):
    assert planted(parents, "iid", draft, target, RULE) < EXACT
  monkeypatch.setattr(kseq_file, "_rho", lambda *_: jnp.float32(1.0))
  wrong = RULE._replace(
    accept_prob=lambda *args: kseq_file._accept_prob(*args),
    residual=lambda *args: kseq_file._residual(*args),
  )
  for parents in (PAIR, TRIPLE):
    assert planted(parents, "iid", draft, target, wrong) > PLANTED


def test_counting_the_wrong_number_of_draws_is_caught():
  """All copies of a chain count, those that were joined as well."""

  def of_first_chain(draft):
    # As if the copies had not been joined: every node has its own child only.
    return draft._replace(parents=jnp.asarray(THREE_CHAINS))

  wrong = RULE._replace(
    residual=lambda draft, *args: RULE.residual(of_first_chain(draft), *args)
  )
  draft, target = distributions(3, 2)
  assert planted(THREE_CHAINS, "iid", draft, target, RULE) < EXACT
  assert planted(THREE_CHAINS, "iid", draft, target, wrong) > PLANTED


@pytest.mark.parametrize(
  "rule",
  [RULE, acceptance.rejection(), acceptance.block(), acceptance.coupled()],
)
def test_no_rule_sorts_the_vocabulary(rule):
  """rule 11; sorting a few nodes is another matter."""
  size, nodes = 4096, 5
  parents = (
    draft_tree.chain(nodes) if rule.chains_only else draft_tree.parallel(2, 2)
  )

  def accept_one(logits, drawn, tokens):
    draft = Draft(tokens, parents, drawn, jnp.full((1,), nodes))
    keys = row_keys(jax.random.key(0), jnp.arange(1))
    coupled = rule.traversal == "coupled"
    noise = Noise(keys, jnp.array([7]), size, coupled)
    warped = sampling.warp(logits, sampling.settings(1, 1.0, 50, 0.9))
    return traverse_draft(rule, draft, logits, warped, noise, nodes - 1)

  logits = jnp.zeros((1, nodes, size))
  tokens = jnp.zeros((1, nodes), jnp.int32)
  lowered = jax.jit(accept_one).lower(logits, logits, tokens)
  hlo = lowered.compile().as_text()
  assert str(size) in hlo
  sorts = [line for line in hlo.splitlines() if " sort(" in line]
  assert not any(str(size) in line for line in sorts)
