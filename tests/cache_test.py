"""Write past the end, commit by moving the length; what is past is unseen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import cache as kv
from specdec.models import transformer
from specdec.models.config import TransformerConfig

CONFIG = TransformerConfig(
  vocab_size=19,
  num_layers=2,
  width=16,
  mlp_width=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  windows=(None, 4),
)
MODEL = transformer.model(CONFIG)
APPLY = jax.jit(MODEL.apply)
SLOTS = 24
TREE = np.array([-1, 0, 0, 0, 1, 1, 3, 4], np.int32)
VERIFY = jax.jit(functools.partial(MODEL.apply, parents=TREE))
LENGTHS = (9, 2)


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(CONFIG, jax.random.key(0))
  )
  return jax.tree.map(
    lambda x: jnp.float32(0.25 * rng.normal(size=x.shape) + (x.ndim == 1)),
    shapes,
  )


def random_tokens(*shape, seed=0):
  tokens = np.random.default_rng(seed).integers(CONFIG.vocab_size, size=shape)
  return jnp.asarray(tokens, jnp.int32)


def buffers(*caches):
  return zip(*(jax.tree.leaves(cache.layers) for cache in caches))


def random_cache(lengths, seed=0):
  """Every slot full of numbers, the scratch too."""
  rng = np.random.default_rng(seed)
  cache = MODEL.init_cache(len(lengths), SLOTS)
  layers = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), cache.layers
  )
  return cache.replace(layers=layers, length=jnp.array(lengths, jnp.int32))


def with_text(params, lengths=LENGTHS):
  """A cache that holds rows of random text, and scratch after it."""
  tokens = random_tokens(len(lengths), max(lengths))
  _, cache = APPLY(params, tokens, random_cache([0] * len(lengths)))
  return cache.replace(length=jnp.array(lengths, jnp.int32))


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("slot", [[0], [4], [6, 0, 3]])
def test_write_touches_its_own_slots(slot, num_tokens):
  rng = np.random.default_rng(0)
  buffer = rng.normal(size=(len(slot), 2, 9, 4)).astype(np.float32)
  new = rng.normal(size=(len(slot), 2, num_tokens, 4))  # float64
  got = kv.write(jnp.asarray(buffer), jnp.asarray(new), jnp.array(slot))
  wanted = buffer.copy()
  for row, first in enumerate(slot):
    wanted[row, :, first : first + num_tokens] = new[row]
  assert got.dtype == buffer.dtype
  np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("lengths", [(5,), (5, 0, 9)])
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_scratch_is_never_seen(params, lengths, parents):
  """Whatever lies past the length, the logits are the same to the last bit."""
  tokens, cache = random_tokens(len(lengths), len(TREE)), random_cache(lengths)
  other = random_cache(lengths, seed=1)

  def mixed(mine, others):
    committed = np.arange(SLOTS) < np.array(lengths)[:, None]  # [B, S]
    return jnp.where(committed[:, None, :, None], mine, 1e3 * others)

  layers = jax.tree.map(mixed, cache.layers, other.layers)
  apply = jax.jit(
    lambda cache: MODEL.apply(params, tokens, cache, parents=parents)
  )
  wanted, _ = apply(cache)
  got, _ = apply(cache.replace(layers=layers))
  np.testing.assert_array_equal(got.logits, wanted.logits)
  changed, _ = apply(other)  # and what is before it does matter
  row = int(np.argmax(lengths))
  assert np.abs(changed.logits - wanted.logits)[row].max() > 0.01


def test_apply_leaves_the_committed_alone(params):
  cache = random_cache(LENGTHS)
  _, after = APPLY(params, random_tokens(2, 5), cache)
  np.testing.assert_array_equal(after.length, LENGTHS)
  for old, new in buffers(cache, after):
    for row, length in enumerate(LENGTHS):
      written = np.s_[row, :, length : length + 5]
      assert (np.asarray(old)[written] != np.asarray(new)[written]).any()
      rest = np.delete(np.arange(SLOTS), np.arange(length, length + 5))
      np.testing.assert_array_equal(new[row, :, rest], old[row, :, rest])


def test_commit_of_a_chain_moves_nothing():
  cache = random_cache(LENGTHS)
  path = random_tokens(2, 4)  # nobody looks at it
  after = kv.commit(cache, path, jnp.array([3, 0]), chain=True)
  for old, new in buffers(cache, after):
    assert new is old
  np.testing.assert_array_equal(after.length, [12, 2])
  # Compiled, the buffers given in are the buffers that come out.
  compiled = (
    jax.jit(kv.commit, static_argnums=3, donate_argnums=0)
    .lower(cache, path, jnp.array([3, 0]), True)
    .compile()
  )
  size = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
  assert compiled.memory_analysis().alias_size_in_bytes >= size
  assert " copy(" not in compiled.as_text()


# Paths in TREE, filled up, and how many positions of each are committed.
PATHS = [
  ([0, 1, 4, 7], 4),
  ([0, 3, 6, 6], 3),
  ([0, 2, 0, 5], 2),
  ([0, 0, 0, 0], 1),
  ([0, 3, 6, 6], 0),
]


@pytest.mark.parametrize("first", range(len(PATHS)))
def test_commit_of_a_tree_moves_the_path(first):
  chosen = PATHS[first], PATHS[-1 - first]
  cache = random_cache(LENGTHS)
  path = jnp.array([nodes for nodes, _ in chosen])
  counts = np.array([count for _, count in chosen])
  after = kv.commit(cache, path, jnp.asarray(counts), chain=False)
  np.testing.assert_array_equal(after.length, np.array(LENGTHS) + counts)
  for old, new in buffers(cache, after):
    for row, (nodes, count) in enumerate(chosen):
      length = LENGTHS[row]
      source = length + np.array(nodes[:count], int)
      got = new[row, :, length : length + count]
      np.testing.assert_array_equal(got, old[row][:, source])
      rest = np.r_[:length, length + 4 : SLOTS]
      np.testing.assert_array_equal(new[row, :, rest], old[row, :, rest])


@pytest.mark.parametrize("first", range(len(PATHS)))
def test_text_goes_on_as_if_the_path_had_been_a_chain(params, first):
  """Verify a tree, commit a path a row: the next logits are a chain's."""
  chosen = PATHS[first], PATHS[-1 - first]
  nodes = random_tokens(2, len(TREE), seed=1)
  following = random_tokens(2, 3, seed=2)
  start = with_text(params)
  _, cache = VERIFY(params, nodes, start)
  path = jnp.array([nodes for nodes, _ in chosen])
  counts = jnp.array([count for _, count in chosen])
  cache = kv.commit(cache, path, counts, chain=False)
  got, _ = APPLY(params, following, cache)

  chain = jnp.take_along_axis(nodes, path, axis=1)  # after counts: anything
  _, cache = APPLY(params, chain, start)
  cache = kv.commit(cache, path, counts, chain=True)
  wanted, _ = APPLY(params, following, cache)
  np.testing.assert_allclose(got.logits, wanted.logits, rtol=0, atol=2e-5)


def test_rows_at_different_lengths_are_rows_alone(params):
  tokens, cache = random_tokens(2, 5, seed=3), with_text(params)
  together, _ = APPLY(params, tokens, cache)
  for row in range(2):
    alone = jax.tree.map(lambda x, row=row: x[row : row + 1], cache)
    output, _ = APPLY(params, tokens[row : row + 1], alone)
    np.testing.assert_allclose(
      output.logits[0], together.logits[row], rtol=0, atol=2e-5
    )
