"""Trees against brute force, in NumPy and traced."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import draft_tree
from specdec.testing.enumeration import path_of

FUNCTIONS = (
  "ancestors",
  "depth",
  "sibling_rank",
  "previous_sibling",
  "max_siblings",
)


def random_tree(rng, num_nodes):
  """Parents in level order: they never descend, so depths do not either."""
  parents = [-1]
  for node in range(1, num_nodes):
    parents.append(int(rng.integers(max(parents[-1], 0), node)))
  return np.array(parents, np.int32)


def trees():
  rng = np.random.default_rng(0)
  shaped = [
    [-1],
    [-1, 0],
    [-1, 0, 0, 0, 0],  # a star
    [-1, 0, 0, 1, 1, 2, 2],  # binary
    [-1, 0, 0, 1, 2, 3, 4],  # two parallel chains
    *([n - 1 for n in range(size)] for size in (3, 9, 16, 17)),
  ]
  random = [random_tree(rng, int(rng.integers(2, 24))) for _ in range(40)]
  return [np.array(parents, np.int32) for parents in shaped] + random


def brute_force(parents):
  """What each function should say, node by node."""
  nodes = range(len(parents))
  paths = [[0, *path_of(parents, node)] for node in nodes]
  older = [[m for m in range(n) if parents[m] == parents[n]] for n in nodes]
  return {
    "ancestors": [[m in paths[n] for m in nodes] for n in nodes],
    "depth": [len(p) - 1 for p in paths],
    "sibling_rank": [len(siblings) for siblings in older],
    "previous_sibling": [max(siblings, default=-1) for siblings in older],
    "max_siblings": max((list(parents).count(n) for n in nodes), default=0),
  }


def check(name, function, parents, kind=np.ndarray):
  """`function` of parents [..., N] answers in kind, node by node right."""
  parents.setflags(write=False)
  got = function(jnp.asarray(parents) if kind is jax.Array else parents)
  if name == "max_siblings" and kind is np.ndarray:
    assert type(got) is int
  else:
    assert isinstance(got, kind)
    assert got.dtype == (bool if name == "ancestors" else np.int32)
  wanted = [
    brute_force(row)[name] for row in parents.reshape(-1, parents.shape[-1])
  ]
  np.testing.assert_array_equal(
    np.reshape(got, np.shape(wanted)), wanted, f"{name} of {parents}"
  )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_trees_agree_with_brute_force(name):
  function, sizes = getattr(draft_tree, name), {}
  for parents in trees():
    check(name, function, parents)
    sizes.setdefault(len(parents), []).append(parents)
  traced = jax.jit(jax.vmap(function))
  for size in (1, 5, 9):  # a compilation each
    check(name, traced, np.stack(sizes[size]), jax.Array)
  if name in ("ancestors", "depth"):
    check(name, function, np.stack(sizes[9][:2])[None])
    # They ask only that a parent precedes its children.
    check(name, function, np.array([-1, 0, 1, 2, 0, 4, 1, 0], np.int32))


def spelled(parents, tokens, node):
  """The text that a node stands for, root left out."""
  return tuple(tokens[path_of(parents, node)].tolist())


def spelling(seed, size=None):
  """A tree with two rows of tokens, and its canonical parents."""
  rng = np.random.default_rng(seed)
  parents = random_tree(rng, size or int(rng.integers(1, 14)))
  tokens = rng.integers(0, 2, size=(2, len(parents)))
  first = []
  for row in tokens:
    texts = [spelled(parents, row, n) for n in range(len(parents))]
    first.append([-1] + [texts.index(texts[p]) for p in parents[1:].tolist()])
  return parents, tokens, np.array(first)


def test_canonical_parents_are_the_first_nodes_of_a_text():
  for seed in range(40):
    parents, tokens, first = spelling(seed)
    joined = draft_tree.canonical(tokens, parents)
    np.testing.assert_array_equal(joined, first)
    # The tree spells what it did, and joining it again changes nothing.
    for row, above in zip(tokens, joined):
      for node in range(len(parents)):
        assert spelled(above, row, node) == spelled(parents, row, node)
    again = draft_tree.canonical(tokens[0], joined[0])
    np.testing.assert_array_equal(again, joined[0])


@pytest.mark.parametrize("static", [False, True])
def test_traced_canonical_is_the_same(static):
  function = jax.jit(draft_tree.canonical)
  for seed in range(2 if static else 20):
    parents, tokens, first = spelling(seed, 12)
    if static:
      function = jax.jit(lambda x, p=parents: draft_tree.canonical(x, p))
    more = () if static else (jnp.asarray(parents),)
    np.testing.assert_array_equal(function(jnp.asarray(tokens), *more), first)


@pytest.mark.parametrize(
  "arguments, expected",
  [
    ((3, 2), [-1, 0, 0, 0, 1, 2, 3]),
    ((2, 3, 1), [-1, 0, 1, 1, 2, 3]),
    ((3, 2, 2), [-1, 0, 1]),
    ((1, 3), [-1, 0, 1, 2]),
    ((2, 0), [-1]),
  ],
)
def test_parallel_chains_share_what_they_should(arguments, expected):
  np.testing.assert_array_equal(draft_tree.parallel(*arguments), expected)
  if arguments[0] == 1:
    np.testing.assert_array_equal(draft_tree.chain(4), expected)


def test_trees_by_their_paths():
  paths = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)]
  tree = draft_tree.from_paths(paths)
  np.testing.assert_array_equal(tree, [-1, 0, 0, 0, 1, 1, 3, 5])
  bounds = [(x.start, x.stop) for x in draft_tree.levels(tree)]
  assert bounds == [(0, 1), (1, 4), (4, 7), (7, 8)]


@pytest.mark.parametrize(
  ("paths", "sentence"),
  [
    ([(0,), (0,)], "is there twice"),
    ([(0,), (2,)], "no sibling 1 before it"),
    ([(0,), (1, 0)], "no parent"),
    ([(0, 0), (0,)], "stands before its parent"),
    ([()], "is no path"),
    ([(-1,)], "is no path"),
  ],
)
def test_paths_that_make_no_tree_are_refused(paths, sentence):
  with pytest.raises(ValueError, match=sentence):
    draft_tree.from_paths(paths)


def expected_tokens(paths, acceptance):
  return sum(np.prod([acceptance[r] for r in path]) for path in paths)


@pytest.mark.parametrize("acceptance", [[0.6, 0.2, 0.1], [0.4, 0.35, 0.2]])
@pytest.mark.parametrize("size", [1, 4])
def test_no_tree_of_that_size_is_expected_to_keep_more(acceptance, size):
  tree = draft_tree.optimal(acceptance, size)
  assert len(tree) == size
  draft_tree.from_paths(tree)
  everything = [
    path
    for depth in range(1, size + 1)
    for path in itertools.product(range(3), repeat=depth)
  ]
  best = 0.0
  for paths in closed_sets(everything, size):
    best = max(best, expected_tokens(paths, acceptance))
  np.testing.assert_allclose(expected_tokens(tree, acceptance), best)


def closed_sets(everything, size):
  """All trees of so many nodes, each once."""
  trees, layer = set(), [frozenset()]
  for _ in range(size):
    larger = set()
    for paths in layer:
      for path in everything:
        parent, sibling = path[:-1], (*path[:-1], path[-1] - 1)
        has_parent = not parent or parent in paths
        in_order = path[-1] == 0 or sibling in paths
        if path not in paths and has_parent and in_order:
          larger.add(paths | {path})
    layer = larger - trees
    trees |= larger
  return layer


def test_optimal_trees_follow_their_acceptance():
  assert draft_tree.optimal([0.9], 4) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
  assert draft_tree.optimal([0.34, 0.33, 0.33], 3) == [(0,), (1,), (2,)]
  assert draft_tree.optimal([[0.5, 0.5], [0.9, 0.1]], 4) == [
    (0,), (1,), (0, 0), (1, 0),
  ]  # fmt: skip
  # The rest is worth nothing.
  assert draft_tree.optimal([[0.5, 0.0]], 9) == [(0,)]
  with pytest.raises(ValueError, match="sum to 1 at most"):
    draft_tree.optimal([0.8, 0.8], 3)
