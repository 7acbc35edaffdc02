"""Trees against brute force, in NumPy and traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import draft_tree

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
  shaped = [np.array(parents, np.int32) for parents in shaped]
  return shaped + [
    random_tree(rng, int(rng.integers(2, 24))) for _ in range(40)
  ]


def path(parents, node):
  """Nodes from the root down to `node`."""
  nodes = []
  while node >= 0:
    nodes.insert(0, node)
    node = int(parents[node])
  return nodes


def brute_force(parents):
  """What each function should say, node by node."""
  nodes = range(len(parents))
  paths = [path(parents, node) for node in nodes]
  older = [[m for m in range(n) if parents[m] == parents[n]] for n in nodes]
  return {
    "ancestors": [[m in paths[n] for m in nodes] for n in nodes],
    "depth": [len(p) - 1 for p in paths],
    "sibling_rank": [len(siblings) for siblings in older],
    "previous_sibling": [max(siblings, default=-1) for siblings in older],
    "max_siblings": max((list(parents).count(n) for n in nodes), default=0),
  }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_in_numpy_out(name):
  for parents in trees():
    before = parents.copy()
    got = getattr(draft_tree, name)(parents)
    if name == "max_siblings":
      assert type(got) is int
    else:
      assert type(got) is np.ndarray
      assert got.dtype == (bool if name == "ancestors" else np.int32)
    np.testing.assert_array_equal(got, brute_force(parents)[name])
    np.testing.assert_array_equal(parents, before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_says_the_same(name):
  by_size = {}
  for parents in trees():
    by_size.setdefault(len(parents), []).append(parents)
  function = jax.jit(jax.vmap(getattr(draft_tree, name)))
  for group in list(by_size.values())[:8]:  # a compilation each
    got = function(jnp.asarray(np.stack(group)))
    assert isinstance(got, jax.Array)
    assert got.dtype == (bool if name == "ancestors" else jnp.int32)
    wanted = [brute_force(parents)[name] for parents in group]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["ancestors", "depth"])
def test_batches(name):
  rng = np.random.default_rng(1)
  parents = np.stack([random_tree(rng, 9) for _ in range(6)]).reshape(2, 3, 9)
  got = getattr(draft_tree, name)(parents)
  for row in np.ndindex(2, 3):
    np.testing.assert_array_equal(got[row], brute_force(parents[row])[name])


def test_any_order_with_parents_first():
  """Depth and ancestry ask only that a parent precedes its children."""
  parents = np.array([-1, 0, 1, 2, 0, 4, 1, 0], np.int32)
  wanted = brute_force(parents)
  np.testing.assert_array_equal(draft_tree.depth(parents), wanted["depth"])
  np.testing.assert_array_equal(
    draft_tree.ancestors(parents), wanted["ancestors"]
  )


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 33])
def test_chain(num_nodes):
  parents = draft_tree.chain(num_nodes)
  assert type(parents) is np.ndarray and parents.dtype == np.int32
  np.testing.assert_array_equal(parents, np.arange(num_nodes) - 1)
  np.testing.assert_array_equal(draft_tree.depth(parents), np.arange(num_nodes))
  triangle = np.tril(np.ones((num_nodes, num_nodes), bool))
  np.testing.assert_array_equal(draft_tree.ancestors(parents), triangle)
  np.testing.assert_array_equal(draft_tree.sibling_rank(parents), 0 * parents)
  assert draft_tree.max_siblings(parents) == min(num_nodes - 1, 1)


def spelled(parents, tokens, node):
  """The text that a node stands for, root left out."""
  text = []
  while node > 0:
    text.insert(0, int(tokens[node]))
    node = int(parents[node])
  return tuple(text)


@pytest.mark.parametrize("seed", range(40))
def test_canonical_hangs_every_text_below_its_first_node(seed):
  rng = np.random.default_rng(seed)
  parents = random_tree(rng, int(rng.integers(1, 14)))
  tokens = rng.integers(0, 2, size=(2, len(parents)))
  first = []
  for row in tokens:
    texts = [spelled(parents, row, n) for n in range(len(parents))]
    first.append([-1] + [texts.index(texts[p]) for p in parents[1:].tolist()])
  found = draft_tree.canonical(tokens, parents)  # NumPy
  np.testing.assert_array_equal(found, first)
  traced = jax.jit(draft_tree.canonical)(
    jnp.asarray(tokens), jnp.asarray(parents)
  )
  np.testing.assert_array_equal(traced, first)
  known = jax.jit(lambda t: draft_tree.canonical(t, parents))(
    jnp.asarray(tokens)
  )
  np.testing.assert_array_equal(known, first)
  # The tree spells what it did, and joining it again changes nothing.
  for row, joined in zip(tokens, found):
    for node in range(len(parents)):
      assert spelled(joined, row, node) == spelled(parents, row, node)
  np.testing.assert_array_equal(
    draft_tree.canonical(tokens[0], found[0]), found[0]
  )


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
