"""Traversal verification, and the traversal by which its path is found.

Exact over every small tree and kind of siblings; block verification on one
path; planted bugs, each a line of the rule's own source that is changed.
"""

import inspect
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from distribution import CHAINS, DEEP, EXACT, PLANTED, SIBLINGS, distributions
from specdec import acceptance, draft_tree, sampling
from specdec.noise import Noise, row_keys
from specdec.step import traverse_draft
from specdec.testing import enumeration
from specdec.traversal import TRAVERSALS, accept_probs, residuals
from specdec.types import BONUS, CORRECTION, Draft

MODULE = sys.modules["specdec.acceptance.traversal"]
RULE, BLOCK, REJECTION = (
  acceptance.traversal(), acceptance.block(), acceptance.rejection(),
)  # fmt: skip


def trees(size: int):
  """Parents of every tree of so many nodes in level order, at most 3 wide:
  the children of a node are tokens of a vocabulary of 3."""
  for rest in itertools.product(range(size), repeat=size - 1):
    parents = (-1, *rest)
    ascending = all(a <= b for a, b in itertools.pairwise(parents))
    narrow = all(parents.count(parent) <= 3 for parent in rest)
    if ascending and narrow and all(p < n for n, p in enumerate(parents)):
      yield parents


def test_there_are_so_many_trees():
  assert [len([*trees(n)]) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 5, 13]


def one_round(rule, kind, parents, draft, target, **options):
  """An outcome whose tree is an argument: one compilation for all trees."""
  drafts = enumeration.drafts(kind, parents, draft)
  depth = distribution.max_depth(parents)
  return enumeration.emitted(
    rule, drafts, target[: depth + 1], traced=True, **options
  )


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["none", *SIBLINGS])
def test_every_tree_leaves_the_targets_distribution(size, kind):
  draft, target = distributions(3, size - 1, seed=size)
  for parents in trees(size):
    if (kind == "none") != (parents == (-1, *range(size - 1))):
      continue  # one path is of its own kind
    outcome = one_round(RULE, kind, parents, draft, target)
    assert distribution.error(outcome, target) < EXACT, parents
    strict = one_round(REJECTION, kind, parents, draft, target)
    assert outcome.accepted >= strict.accepted - 1e-6, parents


def test_more_is_accepted_of_trees_than_by_rejection():
  draft, target = distributions(3, 2)
  for kind in ("iid", "without_replacement"):
    ours, theirs = (
      distribution.check(rule, DEEP, kind, draft, target).accepted
      for rule in (RULE, REJECTION)
    )
    assert ours > theirs + 0.01
  # Of point masses a refusal tells nothing about what comes below.
  ours, theirs = (
    distribution.check(rule, DEEP, "deterministic", draft, target).accepted
    for rule in (RULE, REJECTION)
  )
  np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("joined", [True, False])
def test_iid_chains_are_right_joined_or_not(joined):
  chains = draft_tree.parallel(2, 2), draft_tree.parallel(2, 3, 1)
  for parents in (DEEP, *chains):
    depth = distribution.max_depth(parents)
    draft, target = distributions(3, depth)
    distribution.check(RULE, parents, "iid", draft, target, joined=joined)


@pytest.mark.parametrize("kind", ["none", "deterministic"])
@pytest.mark.parametrize("k", CHAINS)
def test_on_one_path_it_is_block_verification(k, kind):
  for seed, count in itertools.product(range(3), range(1, k + 2)):
    draft, target = distributions(4, k, seed=seed)
    drafts = enumeration.drafts(kind, CHAINS[k], draft, count=count)
    ours, theirs = (
      enumeration.evaluated(rule, drafts, target, count=count)
      for rule in (RULE, BLOCK)
    )
    np.testing.assert_allclose(
      ours.accept_prob[:, 1:], theirs.accept_prob[:, 1:], rtol=2e-6, atol=1e-7
    )
    follows = theirs.accept_prob[..., None] > 0  # after others nothing comes
    np.testing.assert_allclose(
      follows * ours.residual, follows * theirs.residual, rtol=1e-5, atol=1e-6
    )


# Planted bugs.


def with_line(old: str, new: str):
  """The rule of a module whose source has one line changed."""
  source = inspect.getsource(MODULE)
  assert source.count(old) == 1
  module = types.ModuleType("planted")
  exec(source.replace(old, new), module.__dict__)
  return module.traversal()


BUGS = {
  "the parent's weight stays for later siblings": (
    ".at[node].set(own).at[parent].set(after)", ".at[node].set(own)",
  ),
  "the parent's distribution is not refreshed": (
    "distributions.at[parent].set(rest)", "distributions",
  ),
  "a child starts without its parent's weight": (
    "ratio = weight * distribution[token]", "ratio = distribution[token]",
  ),
  "a refusal takes off the draws whatever the weight": (
    "jnp.maximum(weight * distribution - drawn", (
      "jnp.maximum(distribution - drawn"
    ),
  ),
  "what is left is not normalised": (
    "rest / jnp.where(left > 0, left, 1.0), 0.0)", "rest, 0.0)",
  ),
  "the weight after a refusal is what is left": (
    "left + (1.0 - weight)", "jnp.ones_like(left)",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_changed_line_is_caught(name):
  draft, target = distributions(3, 2, seed=1)
  options = DEEP, "without_replacement", draft, target
  assert distribution.planted(*options, with_line("Weng", "Weng")) < EXACT
  assert distribution.planted(*options, with_line(*BUGS[name])) > PLANTED


def test_a_draft_that_is_not_renormalised_after_a_refusal_is_caught():
  """The second child claims what the first was drawn from."""
  draft, target = distributions(3, 2, seed=1)
  options = DEEP, "without_replacement", draft, target, RULE
  assert distribution.planted(*options) < EXACT
  assert distribution.planted(*options, claimed=draft) > PLANTED


@pytest.mark.parametrize("traversal", ["first_child", "last_success"])
def test_another_traversal_is_caught(traversal):
  draft, target = distributions(3, 2, seed=1)
  wrong = RULE._replace(traversal=traversal)
  options = DEEP, "without_replacement", draft, target
  assert distribution.planted(*options, wrong) > PLANTED


# The path.

TREE = np.array([-1, 0, 0, 1, 1, 2, 4], np.int32)  # 3 6 4 1 5 2 0


@pytest.mark.parametrize("parents", [TREE, np.stack([TREE, TREE])])
def test_children_come_before_their_parent(parents):
  for tree in (parents, jnp.asarray(parents)):
    place = np.asarray(draft_tree.post_order(tree)).reshape(-1, 7)
    np.testing.assert_array_equal(place[0], [6, 3, 5, 0, 2, 4, 1])


@pytest.mark.parametrize(
  "kept, path",
  [
    ([], [0]),
    ([1], [0, 1]),
    ([1, 2, 5], [0, 1]),
    ([2, 5], [0, 2, 5]),
    ([1, 4], [0, 1, 4]),
    ([4, 6], [0, 1, 4, 6]),
    ([3, 6], [0, 1, 3]),
    ([6], [0, 1, 4, 6]),
  ],
)
def test_the_path_ends_at_the_first_success(kept, path):
  mask = jnp.isin(jnp.arange(7), jnp.array(kept, int))[None]
  for parents in (TREE, jnp.asarray(TREE)[None]):
    draft = Draft(jnp.zeros((1, 7), int), parents, None, jnp.array([7]))
    walked, num_accepted, last = TRAVERSALS["post_order"].traverse(
      draft, mask, 3
    )
    padded = path + path[-1:] * (4 - len(path))
    np.testing.assert_array_equal(walked, [padded])
    assert num_accepted == len(path) - 1 and last == path[-1]


@pytest.mark.parametrize("kind", SIBLINGS)
def test_prefix_acceptance_is_that_of_the_enumeration(kind):
  draft, target = distributions(3, 2)
  for count in (6, 4):
    drafts = enumeration.drafts(kind, DEEP, draft, count=count)
    outcome = enumeration.emitted(RULE, drafts, target, count=count)
    accept_prob = np.ones(drafts.tokens.shape, np.float32)
    _, accept_prob[:, :count], _ = enumeration.evaluated(
      RULE, drafts, target, count=count
    )
    prefix_acceptance = TRAVERSALS["post_order"].prefix_acceptance(
      Draft(
        jnp.asarray(drafts.tokens),
        jnp.asarray(drafts.parents),
        None,
        jnp.full((len(accept_prob),), count),
      ),
      jnp.asarray(accept_prob),
      2,
    )
    prefix_acceptance = np.asarray(prefix_acceptance)
    assert np.all(np.diff(prefix_acceptance, axis=1) <= 1e-6)
    expected = float(np.sum(drafts.weight[:, None] * prefix_acceptance))
    np.testing.assert_allclose(expected, outcome.accepted, rtol=1e-5)


def round_of(logits, parents, tokens, rule=RULE, row=0):
  """One row's round of deterministic children at temperature 1."""
  draft = Draft(tokens, parents, None, jnp.full((1,), tokens.shape[1]))
  keys = row_keys(jax.random.key(0), jnp.arange(row, row + 1))
  noise = Noise(keys, jnp.array([7]), logits.shape[-1], False)
  warped = sampling.warp(logits, sampling.settings(1, 1.0))
  depth = int(draft_tree.depth(parents).max())
  return traverse_draft(rule, draft, logits, warped, noise, depth)


def test_where_a_token_came_from():
  """A leaf is followed by a bonus, a node whose children were refused by a
  correction, told of the first of them."""
  parents = np.array([-1, 0, 0, 2], np.int32)
  tokens = jnp.array([[0, 0, 1, 2]])
  certain = 1e4 * jax.nn.one_hot(jnp.array([[1, 0, 1, 0]]), 3)
  path, output = round_of(certain, parents, tokens)
  # Node 2 is certain, and after it comes a 1, not node 3's 2.
  np.testing.assert_array_equal(path, [[0, 2, 2]])
  np.testing.assert_array_equal(output.tokens[0, :2], [1, 1])
  assert output.num_accepted == 1 and output.origin[0, 1] == CORRECTION
  assert output.draft_log_probs[0, 1] == -np.inf  # of node 3, which has a 2
  certain = 1e4 * jax.nn.one_hot(jnp.array([[0, 0, 1, 0]]), 3)
  path, output = round_of(certain, parents, tokens)
  assert output.num_accepted == 1 and output.origin[0, 1] == BONUS


def test_nothing_below_a_node_that_is_not_sound_is_accepted():
  """The level of the first such node is the last: its own children count for
  nothing, and a row that does not come to it goes on."""
  parents = np.array([-1, 0, 0, 1, 2], np.int32)
  tokens = jnp.array([[0, 0, 1, 2, 2]])
  good = 1e4 * jax.nn.one_hot(jnp.array([[1, 0, 2, 0, 0]]), 3)
  path, output = round_of(good, parents, tokens)
  np.testing.assert_array_equal(path, [[0, 2, 4]])
  path, output = round_of(good.at[0, 1].set(jnp.nan), parents, tokens)
  assert output.num_accepted == 1 and output.tokens[0, 0] == 1
  assert bool(output.sound[0, 1]) and output.tokens[0, 1] == 2
  path, output = round_of(good.at[0, 2].set(jnp.nan), parents, tokens)
  assert output.num_accepted == 1 and not output.sound[0, 1]


def test_a_tree_of_all_rows_and_trees_of_their_own_agree():
  draft, target = distributions(3, 2)
  drafts = enumeration.drafts("without_replacement", DEEP, draft)
  args = RULE, drafts, target
  for a, b in zip(
    enumeration.evaluated(*args)[1:],
    enumeration.evaluated(*args, traced=True)[1:],
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_vocabulary_is_neither_sorted_nor_gathered():
  size, parents = 4096, np.array(DEEP, np.int32)

  def call(tokens, drawn, target, node):
    draft = Draft(tokens, parents, drawn, jnp.full((1,), 6))
    accept_prob = accept_probs(RULE, draft, target)
    return accept_prob, residuals(RULE, draft, target, node)

  logits = jnp.zeros((1, 6, size))
  tokens = jnp.zeros((1, 6), jnp.int32)
  lowered = jax.jit(call).lower(tokens, logits, logits, jnp.zeros(1, int))
  hlo = lowered.compile().as_text()
  assert str(size) in hlo and " while(" in hlo
  lines = [line for line in hlo.splitlines() if str(size) in line]
  assert not any(" sort(" in line for line in lines)
