"""Recurrent layers: the recurrence itself, paths of trees, conformance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, draft_shape, drafters, sampling, step
from specdec import cache as kv
from specdec.benchmark.batches import Batch
from specdec.benchmark.decoder import Decoder
from specdec.models import params as model_params
from specdec.models import recurrence, transformer
from specdec.models.attention import view
from specdec.models.config import TransformerConfig
from specdec.models.parts import Recurrence
from specdec.roofline import shapes as shapes_of
from specdec.testing import check_drafter
from specdec.types import Params, RecurrentState, Skip, Sparse

SLOW = pytest.mark.slow
SIZES = dict(num_heads=4, num_key_heads=2, key_dim=10, value_dim=7)
BASE = TransformerConfig(
  vocab_size=5,
  num_layers=4,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=32,
)
KINDS = "gated_delta", "mamba2"
# Layers with a window and without, and recurrent ones between them.
WINDOWS = (None, 6, None, None)


def hybrid(kind, num_nodes=8, layers=(0, 2), **options):
  return dataclasses.replace(
    BASE,
    recurrence=Recurrence(
      kind, layers, **SIZES, conv_bias=kind == "mamba2", num_nodes=num_nodes
    ),
    **options,
  )


@functools.cache
def built(config):
  """(model, weights) of which no part is a constant."""
  drawn = transformer.init_params(config, jax.random.key(0))
  leaves, form = jax.tree.flatten(drawn)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [
    3 * x + 0.2 * jax.random.normal(key, x.shape)
    for x, key in zip(leaves, keys)
  ]
  return transformer.model(config), jax.tree.unflatten(form, leaves)


def naive(query, key, value, decay, rate, parents):
  """States node by node, in float64: y [T, heads, value dim]."""
  spread = value.shape[1] // key.shape[1]
  states, outputs = (
    {-1: np.zeros((value.shape[1], key.shape[2], value.shape[2]))},
    [],
  )
  for n, parent in enumerate(parents):
    k = np.repeat(key[n], spread, axis=0)
    state = np.exp(decay[n])[:, None, None] * states[parent]
    new = value[n]
    if rate is not None:
      new = rate[n][:, None] * (new - np.einsum("hk,hkv->hv", k, state))
    states[n] = state + np.einsum("hk,hv->hkv", k, new)
    q = np.repeat(query[n], spread, axis=0)
    outputs.append(np.einsum("hk,hkv->hv", q, states[n]))
  return np.stack(outputs)


@pytest.mark.parametrize("is_delta", [True, False])
def test_nodes_of_a_tree_and_of_several_calls_are_the_recurrence(is_delta):
  """Committed in three rounds with folds between, then a tree in two calls."""
  rng = np.random.default_rng(0)
  committed, tree = 21, [-1, 0, 0, 1, 2, 2]
  total = committed + len(tree)
  parents = [*range(-1, committed - 1)]
  parents += [committed - 1 if p < 0 else committed + p for p in tree]
  query, key = rng.normal(size=(2, total, 2, 10)) / 3
  value = rng.normal(size=(total, 4, 7))
  decay = -rng.exponential(0.3, size=(total, 4))
  rate = rng.uniform(size=(total, 4)) if is_delta else None
  expected = naive(query, key, value, decay, rate, parents)

  config = Recurrence(KINDS[0], (0,), **SIZES, num_nodes=7)
  layer = recurrence.init(config, 1, jnp.float32)
  outputs = []

  def call(layer, start, stop, length, parents=None, first=0):
    seen = view(jnp.array([length]), parents, first, stop - start)
    mixed = [
      jnp.zeros((1, h, stop - start, d)) for h, d in ((2, 10), (2, 10), (4, 7))
    ]
    size = seen.depth.shape[1]
    [layer] = recurrence.make_room([layer], seen.length, size, config)
    _, layer = recurrence.inputs(layer, mixed, seen, config)
    nodes = (
      None if x is None else jnp.asarray(x[None, start:stop], jnp.float32)
      for x in (query, key, value, decay, rate)
    )
    nodes = recurrence.Nodes(*nodes)
    y, layer = recurrence.run(layer, nodes, seen, config)
    outputs.append(np.asarray(y[0]))
    return layer

  for start in range(0, committed, 7):
    layer = call(layer, start, start + 7, start)
  assert layer.folded[0] > 0
  layer = call(layer, 21, 24, 21, np.array(tree[:3]))
  layer = call(layer, 24, 27, 21, np.array(tree), first=3)
  np.testing.assert_allclose(np.concatenate(outputs), expected, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_over_parts_and_trees_are_those_over_the_text(kind):
  """Chunks of any size, and every path of a tree, as the whole text at once."""
  model, params = built(hybrid(kind, windows=WINDOWS))
  tokens = jax.random.randint(jax.random.key(2), (2, 41), 0, 5)
  whole = model.apply(params, tokens, None)[0].logits
  cache = model.init_cache(2, 80)
  outputs = []
  start = 0
  for size in (1, 8, 3, 1, 1, 8, 8, 5, 6):
    output, cache = model.apply(params, tokens[:, start : start + size], cache)
    cache = cache.replace(length=cache.length + size)
    outputs.append(output.logits)
    start += size
  assert start == 41
  np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=1e-3)

  tree = np.array([-1, 0, 0, 1, 1, 2])
  nodes = jax.random.randint(jax.random.key(3), (2, 6), 0, 5)
  output, after = model.apply(params, nodes, cache, parents=tree)
  for leaf in (3, 4, 5):
    path = [leaf]
    while path[0]:
      path.insert(0, int(tree[path[0]]))
    text = jnp.concatenate([tokens, nodes[:, jnp.array(path)]], axis=1)
    expected = model.apply(params, text, None)[0].logits[:, 41:]
    np.testing.assert_allclose(
      output.logits[:, jnp.array(path)], expected, atol=1e-3
    )
    # Committed, the text goes on from there.
    kept = kv.commit(after, jnp.array([path] * 2), jnp.full(2, 3), chain=False)
    more = jnp.concatenate([text, tokens[:, :4]], axis=1)
    expected = model.apply(params, more, None)[0].logits[:, 44:]
    output_after, _ = model.apply(params, tokens[:, :4], kept)
    np.testing.assert_allclose(output_after.logits, expected, atol=1e-3)


def test_a_state_that_was_erased_keeps_what_came_after():
  """Differences of sums of decays would lose it to rounding."""
  rng = np.random.default_rng(3)
  slots, size = 136, 8
  decays = -0.03 * np.ones((1, 1, slots))
  decays[..., :68] = -60.0
  keys, values = rng.normal(size=(2, 1, 1, slots, size))
  state = rng.normal(size=(1, 1, size, size))
  expected = state
  for i in range(slots):
    new = values[:, :, i, :, None] * keys[:, :, i, None]
    expected = np.exp(decays[..., i]) * expected + new
  given = [np.float32(x) for x in (state, keys, values, decays)]
  ours = recurrence._state_after(*given)
  np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_may_move_back(kind):
  """By as many positions as a call may have, and to 0."""
  model, params = built(hybrid(kind))
  tokens = jax.random.randint(jax.random.key(2), (1, 30), 0, 5)
  cache = model.init_cache(1, 48)
  for start in range(0, 24, 8):
    _, cache = model.apply(params, tokens[:, start : start + 8], cache)
    cache = cache.replace(length=cache.length + 8)
  _, cache = model.apply(params, tokens[:, 24:], cache)
  for length in (22, 16, 0):
    back = cache.replace(length=jnp.array([length]))
    output, _ = model.apply(params, tokens[:, length : length + 4], back)
    whole = model.apply(params, tokens, None)[0].logits
    np.testing.assert_allclose(
      output.logits, whole[:, length : length + 4], atol=1e-3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted(kind):
  config = hybrid(kind)
  _, params = built(config)
  held = {path: spec.shape for path, spec in model_params.specs(config).items()}
  shapes = {
    "/".join(key.key for key in path): x.shape
    for path, x in jax.tree.leaves_with_path(params)
  }
  assert held == shapes
  assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))
  cache = transformer.model(config).init_cache(1, 32)
  kept = sum(
    x.nbytes
    for i in config.recurrence.layers
    for x in jax.tree.leaves(cache.layers[i])
  )
  folded = 4 * len(config.recurrence.layers)
  assert config.state_bytes == kept - folded
  [first, *_] = shapes_of.of_config(config).layers
  assert first.state + first.state_keys == config.state_bytes / 2
  assert not first.kv


TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])
DRAFTERS = {
  "lookup": lambda _: drafters.lookup(3, ngram=2, min_ngram=1),
  "model": lambda target: drafters.model(target, 3),
  "model_tree": lambda target: drafters.model(target, shape=TREE),
  "model_shallow": lambda target: drafters.model(
    target, shape=draft_shape.static([-1, 0, 0])
  ),
  "model_dynamic": lambda target: drafters.model(
    target, shape=draft_shape.dynamic(2, 3, 5)
  ),
  "early_exit": lambda target: drafters.early_exit(target, 2, 3),
  "early_exit_tree": lambda target: drafters.early_exit(target, 3, shape=TREE),
  "layer_skip": lambda target: drafters.layer_skip(
    target, Skip((0, 3), (1,)), 3
  ),
  "layer_skip_tree": lambda target: drafters.layer_skip(
    target, Skip((2,), (1, 2)), shape=TREE
  ),
  "quantized": lambda target: drafters.quantized(target, 3),
  "sparse_tree": lambda target: drafters.sparse(
    target, Sparse(4, 1), shape=TREE
  ),
  "suffix": lambda _: drafters.suffix(3),
  "fallback": lambda target: drafters.fallback(
    drafters.lookup(2, ngram=2, min_ngram=1), drafters.model(target, 3)
  ),
}
QUICK = {
  ("gated_delta", "model_tree"),
  ("gated_delta", "sparse_tree"),
  ("mamba2", "early_exit"),
}


@pytest.mark.parametrize(
  "kind, drafter",
  [
    pytest.param(kind, drafter, marks=() if (kind, drafter) in QUICK else SLOW)
    for kind in KINDS
    for drafter in DRAFTERS
  ],
)
def test_conformance(kind, drafter):
  """Exact distributions, coupled text, EOS, ragged rows and refilled ones."""
  target, params = built(hybrid(kind, windows=WINDOWS))
  other = jax.tree.map(
    lambda x: x + 0.3 * jax.random.normal(jax.random.key(5), x.shape), params
  )
  check_drafter(
    lambda: DRAFTERS[drafter](target),
    target,
    Params(params, params if drafter == "quantized" else other),
    rules=(acceptance.rejection(),),
  )


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_room_leaves_the_cache_as_it_was(kind):
  model, params = built(hybrid(kind))
  tokens = jax.random.randint(jax.random.key(2), (1, 40), 0, 5)
  _, cache = model.apply(params, tokens[:, :8], model.init_cache(1, 64))
  cache = cache.replace(length=cache.length + 8)
  output, after = model.apply(params, tokens[:, 8:], cache)
  whole = model.apply(params, tokens, None)[0].logits
  np.testing.assert_allclose(output.logits, whole[:, 8:], atol=1e-3)
  for i in (0, 2):
    jax.tree.map(
      np.testing.assert_array_equal, cache.layers[i], after.layers[i]
    )


def test_rounds_begin_after_positions_that_hold_nothing_without_folding_them():
  """As they are timed without prompts: the first pass is like the others."""
  config = hybrid("mamba2", num_nodes=4)
  target, params = built(config)
  decoder = Decoder(
    target,
    drafters.lookup(2),
    acceptance.coupled(),
    Params(params),
    jax.random.key(0),
    batch=2,
    prompt_size=30,
    max_new_tokens=8,
    runs_prompts=False,
  )
  prompts = [[*range(1, 7)] * 5, [*range(1, 5)] * 5]
  cache = decoder.start(Batch(prompts, range(2))).target_cache
  np.testing.assert_array_equal(cache.length, [29, 19])
  for layer in cache.layers:
    if isinstance(layer, RecurrentState):
      assert np.all(cache.length - layer.folded <= config.recurrence.num_nodes)


def test_more_nodes_than_slots_are_refused():
  target, params = built(hybrid(KINDS[0]))
  with pytest.raises(ValueError, match="of the draft keep slots for 8"):
    drafters.model(target, 8)
  rule, params = acceptance.coupled(), Params(params)

  def started(drafter):
    return decode.start(
      *(target, drafter, rule, params),
      *(np.zeros((1, 2), np.int32), np.array([2]), jax.random.key(0)),
      max_length=8,
      sampling=sampling.settings(1, 0.0),
    )

  with pytest.raises(ValueError, match="of the target keep slots for 8"):
    started(drafters.lookup(8))
  state, eos = started(drafters.lookup(4)), jnp.zeros((0,), jnp.int32)
  with pytest.raises(ValueError, match="of the target keep slots for 8"):
    step.decode_step(target, drafters.lookup(8), rule, params, state, eos)


# Other sizes are other programs, which nothing else has compiled.
NODES = {"path": 9, "slots": 10, "inputs": 11}


@pytest.mark.slow
@pytest.mark.parametrize("bug", NODES)
def test_b18_conformance_finds_planted_bugs(bug, monkeypatch):
  """A path that stays where it was, states of refused tokens, a convolution
  over neighbours instead of ancestors."""
  if bug == "path":
    monkeypatch.setattr(kv, "_commit_recurrent", lambda layer, *_: layer)
  elif bug == "slots":
    make_room = recurrence.make_room

    def forgetful(*args):
      return [
        layer.replace(values=jnp.roll(layer.values, 1, axis=2))
        for layer in make_room(*args)
      ]

    monkeypatch.setattr(recurrence, "make_room", forgetful)
  else:
    before = recurrence._before
    monkeypatch.setattr(
      recurrence,
      "_before",
      lambda x, seen, kernel: before(x, seen._replace(ancestors=None), kernel),
    )
  target, params = built(hybrid(KINDS[0], num_nodes=NODES[bug]))
  with pytest.raises(AssertionError, match=r"breaks '(coupled|greedy|state)'"):
    check_drafter(
      lambda: drafters.model(target, shape=TREE),
      target,
      Params(params, params),
      rules=(acceptance.rejection(),),
    )
