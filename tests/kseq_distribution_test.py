"""k-SEQ: exact, near the best that several draws allow, and easily broken."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

import distribution
from acceptance_distribution_test import (
  DEEP,
  EXACT,
  PAIR,
  PLANTED,
  TRIPLE,
  WARPS,
  check,
  distributions,
  flat,
  planted,
)
from specdec import acceptance, decode, draft_tree, drafters, sampling
from specdec.noise import Noise, row_keys
from specdec.step import traverse_draft
from specdec.types import Draft

kseq_file = sys.modules["specdec.acceptance.kseq"]

RULE = acceptance.kseq()
QUADRUPLE = [-1, 0, 0, 0, 0]
THREE_CHAINS = draft_tree.parallel(3, 2)
SHARED = draft_tree.parallel(2, 3, 1)
SHAPES = {
  "pair": PAIR,
  "triple": TRIPLE,
  "deep": DEEP,
  "two chains": draft_tree.parallel(2, 2),
  "three chains": THREE_CHAINS,
  "shared": SHARED,
}


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", SHAPES)
def test_kseq_is_lossless(name, warp):
  parents = SHAPES[name]
  draft, target = distributions(3, distribution.depths(parents).max(), warp)
  check(RULE, parents, "iid", draft, target)


def test_on_a_chain_it_is_rejection():
  draft, target = distributions(4, 2, "baseline")
  found = check(RULE, draft_tree.chain(3), "none", draft, target)
  expected = distribution.chain_acceptance(draft, target)
  np.testing.assert_allclose(found.accepted, expected, atol=1e-6)


def kept_at_best(drawn, target, num_draws) -> float:
  """P(one of the draws is kept) at the root, by another solver."""

  def kept(rho):
    beta = np.minimum(target / rho, drawn).sum()
    return 1 - (1 - beta) ** num_draws, rho * beta

  def excess(rho):
    found, bound = kept(rho)
    return found - bound

  if excess(1.0) <= 0:
    return kept(1.0)[0]
  return kept(optimize.brentq(excess, 1.0, num_draws, xtol=1e-14))[0]


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
  found = optimize.linprog(gain, A_eq=rows, b_eq=np.array([*right, *target]))
  assert found.status == 0
  return -found.fun


@pytest.mark.parametrize("parents", [PAIR, TRIPLE, QUADRUPLE])
def test_siblings_are_kept_as_often_as_its_paper_says(parents):
  num_draws = len(parents) - 1
  for seed in range(3):
    draft, target = distributions(4, 1, "baseline", seed)
    found = check(RULE, parents, "iid", draft, target).accepted
    expected = kept_at_best(draft[0], target[0], num_draws)
    np.testing.assert_allclose(found, expected, atol=3e-6)
    best = best_coupling(draft[0], target[0], num_draws)
    assert (1 - 1 / np.e) * best <= found <= best + 1e-6


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", ["triple", "three chains", "shared"])
def test_the_targets_own_draft_is_accepted_whole(name, warp):
  parents = SHAPES[name]
  depth = distribution.depths(parents).max()
  _, target = distributions(3, depth, warp)
  found = check(RULE, parents, "iid", target[:depth], target)
  np.testing.assert_allclose(found.accepted, depth, atol=1e-5)


@pytest.mark.parametrize(
  "draft, target",
  [
    ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),
    ([1, 0, 0, 0], [0, 0, 1, 0]),
    ([0, 0, 1, 0], [0, 0, 1, 0]),
    ([0.25, 0.25, 0.25, 0.25], [0, 1, 0, 0]),
    ([0, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]),
    ([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]),
    ([1e-7, 1 - 1e-7, 0, 0], [0.5, 0, 0.5, 0]),
  ],
)
@pytest.mark.parametrize("parents", [PAIR, TRIPLE, draft_tree.parallel(2, 2)])
def test_degenerate_distributions(parents, draft, target):
  depth = distribution.depths(parents).max()
  target = flat(*[target] * (depth + 1))
  check(RULE, parents, "iid", flat(*[draft] * depth), target)


@pytest.mark.parametrize("rubbish", [0.5, -np.inf, np.nan])
def test_nodes_past_count_never_matter(rubbish):
  draft, target = distributions(3, 2, "baseline")
  for count in range(1, 6):
    check(
      RULE,
      DEEP,
      "iid",
      draft,
      target,
      count=count,
      rubbish=rubbish,
      traced=True,
    )


@pytest.mark.parametrize(
  "rule", [acceptance.rejection(), RULE, acceptance.naive()]
)
def test_chains_that_begin_alike_are_worth_joining(rule):
  gains = []
  for seed in range(4):
    draft, target = distributions(3, 2, "baseline", seed)
    apart = check(rule, THREE_CHAINS, "iid", draft, target, joined=False)
    joined = check(rule, THREE_CHAINS, "iid", draft, target)
    gains.append(joined.accepted - apart.accepted)
  print(gains)
  assert min(gains) > 0.005


# Planted bugs.


def test_rho_of_one_is_caught(monkeypatch):
  draft, target = distributions(4, 1, "baseline", seed=6)
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
  draft, target = distributions(3, 2, "baseline", seed=0)
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
    noise = Noise(
      row_keys(jax.random.key(0), jnp.arange(1)),
      jnp.array([7]),
      size,
      rule.traversal == "coupled",
    )
    settings = sampling.settings(1, 1.0, 50, 0.9)
    distribution = sampling.warp(logits, settings)
    return traverse_draft(rule, draft, logits, distribution, noise, nodes - 1)

  distributions = jnp.zeros((1, nodes, size))
  tokens = jnp.zeros((1, nodes), jnp.int32)
  text = (
    jax.jit(accept_one)
    .lower(distributions, distributions, tokens)
    .compile()
    .as_text()
  )
  assert str(size) in text
  found = [line for line in text.splitlines() if " sort(" in line]
  assert not [line for line in found if str(size) in line]


def test_tokens_without_their_distribution_are_refused():
  with pytest.raises(
    ValueError, match="reads the distribution that each draft token"
  ):
    decode.check_pair(drafters.lookup(3).spec, RULE)
