"""Trees drawn by real drafters: exact texts, honest distributions, KV in its
place.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from decode_distribution_test import EXACT, SMALLEST_P, V, p_value, sample
from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.models import transformer
from specdec.noise import Noise, row_keys
from specdec.testing import table_model
from specdec.types import Context, Params
from texts import texts

SLOW = pytest.mark.slow
PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)]
TREE = draft_tree.from_paths(PATHS)
PARALLEL = draft_tree.parallel(3, 2)


def test_trees_by_their_paths():
  np.testing.assert_array_equal(TREE, [-1, 0, 0, 0, 1, 1, 3, 5])
  np.testing.assert_array_equal(PARALLEL, [-1, 0, 0, 0, 1, 2, 3])
  assert draft_tree.levels(TREE) == [
    slice(0, 1),
    slice(1, 4),
    slice(4, 7),
    slice(7, 8),
  ]


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
@pytest.mark.parametrize("size", [1, 3, 5])
def test_no_tree_of_that_size_is_expected_to_keep_more(acceptance, size):
  found = draft_tree.optimal(acceptance, size)
  assert len(found) == size
  draft_tree.from_paths(found)
  everything = [
    path
    for depth in range(1, size + 1)
    for path in itertools.product(range(3), repeat=depth)
  ]
  best = 0.0
  for paths in closed_sets(everything, size):
    best = max(best, expected_tokens(paths, acceptance))
  np.testing.assert_allclose(expected_tokens(found, acceptance), best)


def closed_sets(everything, size):
  """All trees of so many nodes, each once."""
  seen, layer = set(), [frozenset()]
  for _ in range(size):
    grown = set()
    for paths in layer:
      for path in everything:
        parent, sibling = path[:-1], (*path[:-1], path[-1] - 1)
        born = not parent or parent in paths
        in_order = path[-1] == 0 or sibling in paths
        if path not in paths and born and in_order:
          grown.add(paths | {path})
    layer = grown - seen
    seen |= grown
  return layer


def test_optimal_trees_follow_their_acceptance():
  assert draft_tree.optimal([0.9], 4) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
  assert draft_tree.optimal([0.34, 0.33, 0.33], 3) == [(0,), (1,), (2,)]
  assert draft_tree.optimal([[0.5, 0.5], [0.9, 0.1]], 4) == [
    (0,), (1,), (0, 0), (1, 0),
  ]  # fmt: skip
  assert (
    len(draft_tree.optimal([[0.5, 0.0]], 9)) == 1
  )  # the rest is worth nothing
  with pytest.raises(ValueError, match="sum to 1 at most"):
    draft_tree.optimal([0.8, 0.8], 3)


def test_levels_out_of_order_and_unknown_kinds_are_refused():
  with pytest.raises(ValueError, match="not in level order"):
    draft_tree.levels(np.array([-1, 0, 1, 0]))
  with pytest.raises(ValueError, match="accepted: iid"):
    draft_shape.static(TREE, "twins")


@functools.cache
def drafter_of(name, kind, shape):
  if kind == "dynamic":
    expansion = draft_shape.dynamic(2, 3, 6)
  else:
    parents = {"tree": TREE, "parallel": PARALLEL, "chain": draft_tree.chain(4)}
    expansion = draft_shape.static(parents[shape], kind)
  if name == "model":
    return drafters.model(learned_kinds.target("llama")[0], shape=expansion)
  model, _ = learned_kinds.target(name)
  return drafters.early_exit(model, 2, shape=expansion)


def other_params():
  """A draft that often agrees with the target."""
  _, target = learned_kinds.target("llama")
  noise = transformer.init_params(learned_kinds.TARGET, jax.random.key(5))
  return Params(target, jax.tree.map(lambda t, o: t + 0.6 * o, target, noise))


def generate(name, kind, shape, rule, params=None):
  family = "gemma" if name == "gemma" else "llama"
  (own, *positional), options = learned_kinds.arguments(family)
  params = params or (other_params() if name == "model" else own)
  return decode.generate(
    learned_kinds.target(family)[0],
    drafter_of(name, kind, shape),
    rule,
    params,
    *positional,
    **options,
  )


def test_a_chain_as_a_tree_is_the_chain():
  """Same distributions, same addresses of noise: the same drafts, token for
  token.
  """
  model, _ = learned_kinds.target("llama")
  (_, *positional), options = learned_kinds.arguments("llama")
  states = [
    decode.generate(
      model,
      drafter,
      acceptance.rejection(),
      other_params(),
      *positional,
      **options,
    )
    for drafter in (
      drafters.model(model, 3),
      drafters.model(
        model, shape=draft_shape.static(draft_tree.chain(4), "iid")
      ),
    )
  ]
  assert texts(states[0]) == texts(states[1])
  jax.tree.map(np.testing.assert_array_equal, states[0].stats, states[1].stats)


@pytest.mark.parametrize("kind", [*draft_shape.KINDS, "dynamic"])
def test_the_targets_own_tree_never_loses_its_first_child(kind):
  """Every KV of the draft's cache is right, whatever path was committed."""
  _, params = learned_kinds.target("llama")
  state = generate(
    "model", kind, "tree", acceptance.greedy(), Params(params, params)
  )
  cold = learned_kinds.TEMPERATURES == 0
  drafted = np.asarray(state.stats.drafted)[cold]
  accepted = np.asarray(state.stats.accepted)[cold]
  # Greedy rows: the likeliest child is the target's choice, to any depth that
  # has first children all the way: two here.
  np.testing.assert_array_equal(accepted[:, :2], drafted[:, :2])


@pytest.mark.parametrize(
  "kind",
  [
    "without_replacement",
    pytest.param("iid", marks=SLOW),
    pytest.param("deterministic", marks=SLOW),
  ],
)
def test_texts_follow_the_targets_distribution(kind):
  drafter = drafters.model(
    table_model.model(V), shape=draft_shape.static(TREE, kind)
  )
  found = sample(drafter, acceptance.rejection())
  p = [p_value(*pair) for pair in zip(found, EXACT)]
  assert min(p) > SMALLEST_P, p


def test_distributions_are_those_that_the_tokens_came_from():
  """Siblings differ, and each stands in what its earlier siblings left."""
  rng = np.random.default_rng(0)
  rows, size = 64, 6
  logits = jnp.asarray(rng.normal(size=(rows, size)), jnp.float32)
  keys = row_keys(jax.random.key(0), jnp.arange(rows))
  noise = Noise(keys, jnp.full((rows,), 3), size, coupled=False)
  context = Context(
    jnp.zeros((rows, 4), jnp.int32),
    jnp.full((rows,), 3),
    sampling.settings(rows, 1.0, 3),
    None,
    noise.draft,
  )
  parents = np.array([-1, 0, 0, 0, 0], np.int32)
  expansion = draft_shape.static(parents, "without_replacement")
  tree, _ = expansion.sample_tree(context, logits, lambda *_: None, None)
  distribution = np.exp(np.asarray(sampling.warp(logits, context.sampling)))
  tokens = np.asarray(tree.draft.tokens)
  for row in range(rows):
    left = distribution[row].copy()
    for node in range(1, 5):
      said = np.exp(np.asarray(tree.draft.log_probs)[row, node])
      if left.sum() == 0:  # top-k = 3 is used up: uniform over the unseen
        left = np.ones(size)
        left[tokens[row, 1:node]] = 0
      np.testing.assert_allclose(said, left / left.sum(), atol=1e-5)
      assert said[tokens[row, node]] > 0
      left = distribution[row].copy()
      left[tokens[row, 1 : node + 1]] = 0
