"""Greedy multi-path block verification: exact, and as its order says.

The chosen chain's distribution by brute force; float32 against float64; planted
bugs, each a line of the rule's own source that is changed.
"""

import inspect
import itertools
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from distribution import CHAINS, DEEP, EXACT, PLANTED, distributions, flat
from specdec import acceptance, draft_shape, draft_tree
from specdec.inputs import check_pair
from specdec.testing import enumeration

MODULE = sys.modules["specdec.acceptance.multipath"]
RULE, BLOCK = acceptance.multipath(), acceptance.block()
SIZES = [(2, 1), (3, 1), (2, 2), (3, 2), (2, 3)]  # chains, tokens of each


@pytest.mark.parametrize("warp", distribution.WARPS)
@pytest.mark.parametrize("num, length", SIZES)
def test_texts_have_the_targets_distribution(num, length, warp):
  parents = draft_tree.parallel(num, length)
  for seed in range(2):
    draft, target = distributions(3, length, warp, seed)
    distribution.check(RULE, parents, "iid", draft, target)


@pytest.mark.parametrize(
  "draft, target",
  [
    ([0.3, 0.7, 0], [0, 0, 1]),
    ([1, 0, 0], [0, 0, 1]),
    ([0, 1, 0], [0, 1, 0]),
    ([0.3, 0.4, 0.3], [0, 1, 0]),
    ([0.1, 0.3, 0.6], [0.1, 0.3, 0.6]),
    ([1e-7, 1 - 1e-7, 0], [0.5, 0, 0.5]),
  ],
)
def test_distributions_that_break_things(draft, target):
  parents = draft_tree.parallel(2, 2)
  outcome = distribution.emitted(
    RULE, parents, "iid", flat(draft, 2), flat(target, 3)
  )
  assert np.isfinite(outcome.accepted)
  assert distribution.error(outcome, flat(target, 3)) < EXACT


@pytest.mark.parametrize("count", range(1, 8))
def test_levels_that_are_there_in_part_are_not_there(count):
  draft, target = distributions(3, 2)
  parents = draft_tree.parallel(3, 2)
  distribution.check(RULE, parents, "iid", draft, target, count=count)


@pytest.mark.parametrize("k", CHAINS)
def test_of_one_chain_it_is_block_verification(k):
  for count in range(1, k + 2):
    draft, target = distributions(3, k, seed=k)
    drafts = enumeration.drafts("none", CHAINS[k], draft, count=count)
    ours, theirs = (
      enumeration.evaluated(rule, drafts, target, count=count)
      for rule in (RULE, BLOCK)
    )
    np.testing.assert_allclose(
      ours.accept_prob[:, 1:], theirs.accept_prob[:, 1:], rtol=1e-5, atol=1e-6
    )
    follows = theirs.accept_prob[..., None] > 0
    np.testing.assert_allclose(
      follows * ours.residual, follows * theirs.residual, rtol=1e-4, atol=1e-6
    )


def chosen_chains(draft, target, num) -> list[np.ndarray]:
  """Conditional distributions of the best of `num` chains, by brute force."""
  length, size = len(draft), len(draft[0])

  def rank(path):
    """The order of a dictionary whose letters are steps of the ratio."""
    letters = []
    for depth, token in enumerate(path):
      p, q = (side[depth][path[:depth]] for side in (target, draft))
      step = int(MODULE._place(jnp.float32(p), jnp.float32(q))[token])
      letters.append((step, token))
    return letters

  paths = [*itertools.product(range(size), repeat=length)]
  paths.sort(key=rank)
  joint = enumeration.text_distribution(draft)
  mass = np.cumsum([joint[path] for path in paths])
  best = np.zeros_like(joint)
  for path, high, low in zip(paths, mass, np.append(0.0, mass)):
    best[path] = high**num - low**num
  conditional = []
  for depth in range(length):
    upto = best.sum(axis=tuple(range(depth + 1, length)))
    conditional.append(upto / upto.sum(axis=-1, keepdims=True))
  return conditional


@pytest.mark.parametrize("num, length", SIZES)
def test_it_accepts_what_block_accepts_of_the_best_chain(num, length):
  draft, target = distributions(3, length)
  best = chosen_chains(draft, target, num)
  expected = distribution.block_acceptance(best, target)
  parents = draft_tree.parallel(num, length)
  outcome = distribution.check(RULE, parents, "iid", draft, target)
  np.testing.assert_allclose(outcome.accepted, expected, atol=2e-6)


def test_of_two_chains_it_accepts_most_of_the_lossless_rules():
  for length in (2, 3):
    draft, target = distributions(3, length)
    parents = draft_tree.parallel(2, length)
    ours, *others = (
      distribution.check(rule, parents, "iid", draft, target).accepted
      for rule in (RULE, acceptance.traversal(), acceptance.kseq())
    )
    one = distribution.block_acceptance(draft, target)
    assert ours > max(others) + 0.05 and min(others) > one


def test_of_a_draft_that_is_the_target_it_accepts_less_than_the_others():
  _, target = distributions(3, 2)
  parents = draft_tree.parallel(2, 2)
  ours, theirs = (
    distribution.check(rule, parents, "iid", target, target).accepted
    for rule in (RULE, acceptance.traversal())
  )
  np.testing.assert_allclose(theirs, 2, atol=1e-5)
  assert ours < theirs - 0.1


# float32.


def exact_chosen(drawn, place, below, mass, num):
  """The same in float64: (mass before each token, the distribution)."""
  order = np.lexsort((np.arange(len(drawn)), place))
  before = np.empty(len(drawn))
  before[order] = np.cumsum(drawn[order]) - drawn[order]
  low = below + mass * before
  powers = sum(
    (low + mass * drawn) ** i * low ** (num - 1 - i) for i in range(num)
  )
  return before, drawn * powers / np.sum(drawn * powers)


def worst_error(num: int, chosen, size: int = 2000) -> float:
  """Most total variation of `chosen` from float64, along chains of six."""
  worst = 0.0
  for seed in range(4):
    rng = np.random.default_rng(seed)
    below, mass = 0.0, 1.0
    for _ in range(6):
      logits = rng.normal(scale=3.0, size=size)
      likely = enumeration.softmax(logits, 1.0)
      drawn = enumeration.softmax(logits + rng.normal(size=size), 1.0)
      drawn = drawn.astype(np.float32)
      place = np.asarray(MODULE._place(jnp.float32(likely), jnp.asarray(drawn)))
      drawn = drawn.astype(float) / drawn.sum(dtype=float)
      before, exact = exact_chosen(drawn, place, below, mass, num)
      mine = MODULE._mass_before(jnp.float32(drawn), jnp.asarray(place))
      found = chosen(
        jnp.float32(drawn), mine, jnp.float32(below), jnp.float32(mass), num
      )
      worst = max(worst, enumeration.distance(np.asarray(found, float), exact))
      token = rng.choice(size, p=exact)
      low, own = below + mass * before[token], mass * drawn[token]
      below, mass = low / (low + own), own / (low + own)
  return worst


def difference_of_powers(drawn, before, below, mass, num):
  """As the distribution is written: it cancels."""
  low = below + mass * before
  top = (below + mass) ** num - below**num
  return ((low + mass * drawn) ** num - low**num) / top


@pytest.mark.slow
def test_float32_carries_them_with_the_longest_vocabularies():
  assert worst_error(MODULE.MOST_CHAINS, MODULE._chosen, 262_144) < 1e-6


@pytest.mark.slow
def test_float32_carries_as_many_chains_as_are_allowed():
  assert worst_error(MODULE.MOST_CHAINS, MODULE._chosen) < 1e-6
  few = worst_error(2, MODULE._chosen)
  assert worst_error(16 * MODULE.MOST_CHAINS, MODULE._chosen) > 10 * few


@pytest.mark.parametrize("num", [4, 32])
def test_a_difference_of_powers_would_not_be_right_in_float32(num):
  error = worst_error(num, difference_of_powers)
  assert np.isnan(error) or error > PLANTED


# Planted bugs.


def with_line(old: str, new: str):
  """The rule of a module whose source has one line changed."""
  source = inspect.getsource(MODULE)
  assert source.count(old) == 1
  module = types.ModuleType("planted")
  exec(source.replace(old, new), module.__dict__)
  return module.multipath()


BUGS = {
  "the chain counts as drawn alone": ("drawn * powers\n", "drawn\n"),
  "one chain fewer": (
    " = _chosen(drawn, before, below, mass, num)",
    " = _chosen(drawn, before, below, mass, num - 1)",
  ),
  "the chains before it are forgotten": ("low / scale, own", "below, own"),
  "the last in order is taken": ("jnp.where(children, order, -1)", (
    "jnp.where(children, -order, -10**6)"
  )),
  "the weight is not carried": ("moved = child, ratio,", (
    "moved = child, jnp.float32(1),"
  )),
  "what follows ignores the weight": ("jnp.maximum(weight * target", (
    "jnp.maximum(target"
  )),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_changed_line_is_caught(name):
  draft, target = distributions(3, 2, seed=1)
  options = draft_tree.parallel(2, 2), "iid", draft, target
  assert distribution.planted(*options, with_line("Invar", "Invar")) < EXACT
  assert distribution.planted(*options, with_line(*BUGS[name])) > PLANTED


def test_a_level_in_part_that_counts_is_caught():
  rule = with_line("axis=-1) == num\n", "axis=-1) <= num\n")
  draft, target = distributions(3, 2, seed=1)
  options = draft_tree.parallel(3, 2), "iid", draft, target
  assert distribution.planted(*options, RULE, count=6) < EXACT
  assert distribution.planted(*options, rule, count=6) > PLANTED


def test_chains_that_are_not_joined_are_caught():
  draft, target = distributions(3, 2, seed=1)
  options = draft_tree.parallel(2, 2), "iid", draft, target, RULE
  assert distribution.planted(*options, joined=False) > PLANTED


# Which drafts it evaluates.


@pytest.mark.parametrize(
  "parents, sentence",
  [
    (DEEP, "drafts another tree"),
    (draft_tree.parallel(2, 3, 1), "drafts another tree"),
    (draft_tree.parallel(33, 1), "at most 32.*drafts 33 chains"),
  ],
)
def test_other_drafts_are_refused(parents, sentence):
  spec = draft_shape.static(parents, "iid").spec
  with pytest.raises(ValueError, match=sentence):
    check_pair(spec, RULE)
  check_pair(spec, acceptance.kseq())


@pytest.mark.parametrize("num, length", SIZES)
def test_chains_are_accepted(num, length):
  spec = draft_shape.static(draft_tree.parallel(num, length), "iid").spec
  assert spec.num_chains == num
  check_pair(spec, RULE)


def test_one_chain_and_drawn_siblings():
  check_pair(draft_shape.chain(3).spec, RULE)
  spec = draft_shape.static(DEEP, "without_replacement").spec
  with pytest.raises(ValueError, match="multipath is right for iid, none"):
    check_pair(spec, RULE)
