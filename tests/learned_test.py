"""Draft heads, all kinds, from random weights: distributions, refusals, sizes.

That they are right is that serve.py drafts by the very distributions that
unroll.py is trained on (trap B21), whatever was accepted; conformance_test
checks what holds for every drafter.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learned_kinds import (
  BATCH,
  IDS,
  KINDS,
  LENGTHS,
  TARGET,
  K,
  L,
  V,
  differences,
  draft_head,
  head_config,
  prompts,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  stumbling,
  target,
  teacher,
  weights,
)
from specdec import acceptance, decode, draft_shape, drafters, sampling, step
from specdec import draft_tree as trees
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.drafters.heads.vocabulary import most_frequent
from specdec.models import attention, transformer
from specdec.types import Params
from two_forms import check_apart, check_equal

COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
SHAPES = {
  "tree": draft_shape.static(trees.from_paths(PATHS)),
  "dynamic": draft_shape.dynamic(2, 3, 6),
}
SLOW = pytest.mark.slow


NARROW = {("eagle", K), ("recycle", K), ("recycle", "tree")}


def shape_of(shape):
  """shape: k of a chain, or a name in SHAPES."""
  return SHAPES[shape] if shape in SHAPES else draft_shape.chain(shape)


@functools.cache
def drafter_of(kind, shape):
  drafter = serve.drafter(draft_head(kind), target()[0], shape_of(shape))
  # A second width is half a program more: for some of them.
  return stumbling(drafter, narrow=(kind, shape) in NARROW)


# B21: the teacher-forced form and the one that decodes.
LONG = "eagle", "prophet", "recycle", "hydra", "published_eagle"


def forms_apart(kind, drafter):
  """How far the two forms are apart, level by level."""
  state = speculate(drafter, REJECTION, weights(kind), np.ones(BATCH))
  return differences(kind, False, state)


@pytest.mark.parametrize(
  "kind",
  [pytest.param(kind, marks=[SLOW] if kind in LONG else []) for kind in KINDS],
)
def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on(kind):
  check_equal(forms_apart(kind, drafter_of(kind, K)), 1e-4)


def paths_of(parents):
  """Every node's path from the root, the root left out."""
  paths = [()]
  for node, parent in enumerate(parents[1:], 1):
    paths.append((*paths[parent], node))
  return paths


def slow(*kinds, shape):
  return [pytest.param(kind, shape, marks=SLOW) for kind in kinds]


@pytest.mark.parametrize(
  "kind, shape",
  [
    ("prophet", "tree"),
    *slow("eagle", "recycle", shape="tree"),
    # It borrows the target's scratch, in another order.
    ("recycle", "dynamic"),
    *slow("eagle3", "mtp", "medusa", "hydra", "head", shape="tree"),
    *slow(*KINDS[:6], "head", shape="dynamic"),
  ],
)
def test_b21_so_is_a_tree_in_the_middle_of_a_text(kind, shape):
  drafter, draft = drafter_of(kind, shape), weights(kind)
  state = speculate(drafter, COUPLED, draft, np.ones(BATCH), most=5)

  @jax.jit
  def propose(draft, state):
    params = Params(target()[1], draft)
    context = step.context_of(state, V, COUPLED)
    draft, _ = drafter.propose(params, state.draft_state, context)
    return drafter.spec.with_tree(draft)

  drafted = propose(draft, state)
  tokens = np.asarray(drafted.tokens)
  parents = np.broadcast_to(np.asarray(drafted.parents), tokens.shape)
  # Every node's path as the end of a text of its own.
  size = L + K
  lines = np.zeros((BATCH, tokens.shape[1], size), np.int32)
  ends = np.zeros(tokens.shape, int)
  for b, n in np.ndindex(*tokens.shape):
    path = tokens[b, list(paths_of(parents[b])[n])]
    length = int(state.length[b])
    lines[b, n, :length] = state.tokens[b, :length]
    lines[b, n, length : length + len(path)] = path
    ends[b, n] = length + len(path)
  distributions = teacher(kind)(lines.reshape(-1, size), draft)
  distributions = np.asarray(distributions).reshape(K, *lines.shape, V)
  checked = 0
  for b, n in np.ndindex(*tokens.shape):
    level = len(paths_of(parents[b])[n])
    children = [c for c in range(tokens.shape[1]) if parents[b, c] == n]
    if not children:
      continue
    distribution = np.array(distributions[level, b, n, ends[b, n] - 1])
    if drafted.log_probs is None:  # the likeliest are tried
      np.testing.assert_array_equal(
        tokens[b, children], np.argsort(-distribution)[: len(children)]
      )
      checked += len(children)
      continue
    for child in children:  # drawn one after another
      left = distribution - np.logaddexp.reduce(distribution)
      # Tokens that it cannot draft token have no probability in either.
      np.testing.assert_allclose(drafted.log_probs[b, child], left, atol=1e-4)
      assert set(np.flatnonzero(np.isfinite(left))) <= set(IDS)
      distribution[tokens[b, child]] = -np.inf
      checked += 1
  assert checked == BATCH * len(PATHS)


# Mistakes that B21 must see.


def nothing_run_again(drafter, patch):
  """What was drafted stays as it was drafted."""

  def update(params, state, *rest):
    after = drafter.update(params, state, *rest)
    layers = state.cache.layers
    return after._replace(cache=after.cache.replace(layers=layers))

  return drafter._replace(update=update)


def seed_too_early(drafter, patch):
  """The seed is what the target returned one accepted token before."""

  def update(params, state, context, draft, accept_result, output):
    after = drafter.update(params, state, context, draft, accept_result, output)
    early = accept_result._replace(
      num_accepted=jnp.maximum(accept_result.num_accepted - 1, 0)
    )
    wrong = drafter.update(params, state, context, draft, early, output)
    return after._replace(seed=wrong.seed)

  return drafter._replace(update=update)


def prompt_shifted(drafter, patch):
  """A prompt's token is run with what the target returned after it."""

  def init(params, context, output):
    shifted = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), output)
    right = drafter.init(params, context, output)
    return drafter.init(params, context, shifted)._replace(seed=right.seed)

  return drafter._replace(init=init)


def view_changed(name, change):
  """Draft tokens are a position too `far`, or write `over` the one before."""

  def plant(drafter, patch):
    honest = attention.view

    def changed(length, parents, first, *rest):
      view = honest(length, parents, first, *rest)
      return change(view) if first else view

    patch.setattr(serve, "attention", types.SimpleNamespace(view=changed))
    return drafter

  plant.__name__ = name
  return plant


far = view_changed("far", lambda view: view._replace(depth=view.depth + 1))
over = view_changed(
  "over", lambda x: x._replace(length=x.length - 1, depth=x.depth + 1)
)


def planted(plant, *kinds):
  return [pytest.param(kind, plant, marks=SLOW) for kind in kinds]


@pytest.mark.parametrize(
  "kind, plant",
  [
    ("eagle", nothing_run_again),
    ("prophet", seed_too_early),
    *planted(nothing_run_again, "eagle3", "mtp", "recycle"),
    *planted(seed_too_early, "eagle", "hydra", "medusa", "recycle"),
    *planted(prompt_shifted, "eagle", "eagle3", "recycle"),
    *planted(far, "eagle", "mtp", "prophet"),
    *planted(over, "prophet", "recycle"),
  ],
)
def test_b21_a_plant_shows_that_training_and_drafting_differ(
  kind, plant, monkeypatch
):
  honest = serve.drafter(draft_head(kind), target()[0], draft_shape.chain(K))
  gaps = forms_apart(kind, stumbling(plant(honest, monkeypatch)))
  check_apart(gaps, 1e-3)  # ten times what is let pass


@pytest.mark.parametrize("kind, shape", [("eagle", K), ("recycle", "dynamic")])
def test_temporaries_are_small_next_to_the_caches(kind, shape):
  """Rule 9, at lengths at which a copy would dwarf all else."""
  wide = dataclasses.replace(TARGET, head_dim=32)
  model, head = transformer.model(wide), draft_head(kind, config=wide)
  drafter = serve.drafter(head, model, shape_of(shape))

  def generate(key, prompt, length):
    target = transformer.init_params(wide, key)
    net = draft_heads.weights_of(head, head.init(key), target)
    return decode.generate(
      model, drafter, REJECTION, Params(target, net), prompt, length, key,
      max_length=2040, sampling=sampling.settings(BATCH),
    )  # fmt: skip

  lowered = jax.jit(generate).lower(jax.random.key(0), prompts(), LENGTHS)
  memory = lowered.compile().memory_analysis()
  cache = jax.tree.leaves(lowered.out_info.target_cache.layers)
  size = sum(x.size * x.dtype.itemsize for x in cache)
  assert memory.temp_size_in_bytes < size / 4


def test_spread_puts_every_logit_in_its_place():
  logits = jnp.arange(2.0 * len(IDS)).reshape(2, -1)
  spread = np.asarray(draft_heads.spread(draft_head("medusa"), logits))
  np.testing.assert_array_equal(spread[:, IDS], logits)
  assert np.sum(np.isfinite(spread)) == logits.size


@pytest.mark.parametrize(
  "text, count, ids",
  [
    ([5, 1, 5, 2, 1, 3], 3, [1, 2, 5]),  # of 2 and 3 the lower
    ([5, 1, 5, 2, 1, 3], 6, [0, 1, 2, 3, 4, 5]),
    ([], 2, [0, 1]),
  ],
)
def test_the_most_frequent_tokens(text, count, ids):
  chosen = most_frequent(np.array(text, int), count, 8)
  assert chosen.tolist() == ids and chosen.dtype == np.int32
  assert most_frequent(np.array(text, int), 0, 8) is None


@pytest.mark.parametrize("ids", [None, IDS[:-1]])
def test_a_vocabulary_other_than_the_head_configs_is_refused(ids):
  given = "none" if ids is None else "10"
  with pytest.raises(ValueError, match=f"vocabulary = 11, and {given} are"):
    drafters.LEARNED["eagle"](head_config("eagle"), TARGET, ids)


@pytest.mark.parametrize(
  "kind, changes, complaint",
  [
    ("eagle", dict(kind="beagle"), "kind 'beagle' is unknown; known: block, "),
    ("eagle", dict(head="our"), "head 'our' is unknown; known: own, shared"),
    ("eagle", dict(head="own"), "it must be 'shared'"),
    ("mtp", dict(levels=0), "levels = 0; it must be >= 1"),
    ("mtp", dict(vocabulary=-1), "vocabulary = -1"),
    ("mtp", dict(num_layers=0), "num_layers = 0 of mtp"),
    ("head", dict(num_layers=-1), "num_layers = -1 of exit"),
    ("medusa", dict(num_layers=1), "medusa has no layers"),
    ("eagle3", dict(features=()), "eagle3 needs features"),
    ("mtp", dict(features=(1,)), "mtp reads no layers"),
    ("head", dict(exit_layer=0), "an exit needs a layer above 0"),
    ("mtp", dict(exit_layer=1), "exit_layer = 1 of mtp"),
    (
      "mtp",
      dict(feeds_back_hidden=True),
      "feeds_back_hidden belongs to an exit, not to mtp",
    ),
    ("mtp", dict(num_heads=3, num_kv_heads=2), "num_heads"),
  ],
)
def test_head_configs_refuse(kind, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    head_config(kind, **changes)


@pytest.mark.parametrize(
  "kind, changes, complaint",
  [
    ("eagle3", dict(features=(1, 4)), "layers 4; this target has 3, so .*0..3"),
    ("eagle3", dict(features=(-1, 2)), "layers -1; this target has 3"),
    ("head", dict(exit_layer=3), "exit_layer = 3; .*must be in 1..2"),
    ("mtp", dict(vocabulary=18), "vocabulary = 18; the target has 17 tokens"),
  ],
)
def test_a_target_that_does_not_fit(kind, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    head_config(kind, **changes).check(TARGET)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_do_not_draft_token_deeper_than_they_are(kind):
  with pytest.raises(
    ValueError, match=f"5 levels of draft tokens.* {kind} has 4"
  ):
    drafter_of(kind, 5)


def test_an_exits_tree_keeps_what_it_runs():
  head = draft_head("recycle")
  with pytest.raises(ValueError, match="runs 6 nodes and the tree has 5"):
    serve.drafter(head, target()[0], draft_shape.dynamic(3, 3, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_cost_of_state_is_the_size_of_its_arrays(kind, dtype):
  config = dataclasses.replace(TARGET, dtype=dtype)
  model, head = transformer.model(config), draft_head(kind, config=config)
  drafter = serve.drafter(head, model, draft_shape.chain(K))
  cost = head_cost.drafter_cost(head, config)

  def begin(key, prompt, length):
    target = transformer.init_params(config, key)
    draft = draft_heads.weights_of(head, head.init(key), target)
    cache = model.init_cache(len(length), L)
    output, _ = model.apply(target, prompt, cache, features=head.features)
    state = decode.start(
      *(model, drafter, COUPLED, Params(target, draft), prompt, length, key),
      max_length=L,
      sampling=sampling.settings(BATCH, 0.0),
    )
    return (output.hidden, output.features), state.draft_state

  read, state = jax.eval_shape(begin, jax.random.key(0), prompts(), LENGTHS)

  def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  assert size(read) == prompts().size * cost.hidden_bytes
  assert size(state.seed) == BATCH * cost.row_bytes
  slots = state.cache.num_slots if head.has_kv_cache else 0
  assert size(state.cache.layers) == BATCH * slots * cost.position_bytes


def test_weights_that_a_draft_token_reads():
  head = draft_head("medusa")
  width, tokens = head.head_config.width, len(IDS)
  # One head's block, the norm before the vocabulary, and the vocabulary.
  expected = width**2 + width + tokens * width
  assert head_cost.step_weights(head, TARGET)[0] == expected
  head = draft_head("eagle", full=True)
  net = jax.eval_shape(head.init, jax.random.key(0))
  every = (
    sum(x.size for x in jax.tree.leaves(net)) + TARGET.vocab_size * TARGET.width
  )
  assert head_cost.step_weights(head, TARGET)[0] == every
