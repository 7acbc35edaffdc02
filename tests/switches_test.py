"""JAX's own switches, a broken model and bad arguments of `generate`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import table_loop
import translated_test
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.types import (
  DRAFT_FAULT,
  NO_FAULT,
  TARGET_FAULT,
  Model,
  ModelOutput,
  Params,
  Sampling,
)
from table_loop import LENGTH, MODEL, PARAMS, PROMPT, V


def shaped(shape):
  return drafters.model(MODEL, shape=shape)


CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")
WAYS = {
  "baseline": (decode.NO_DRAFTER, decode.NO_DRAFT_RULE),
  "lookup": (drafters.lookup(3, min_ngram=1), acceptance.coupled()),
  "rejection": (drafters.model(MODEL, 3), acceptance.rejection()),
  "block": (drafters.model(MODEL, 3), acceptance.block()),
  "kseq": (shaped(CHAINS), acceptance.kseq()),
  "tree": (
    shaped(draft_shape.static([-1, 0, 0, 1, 1])),
    acceptance.rejection(),
  ),
  "dynamic": (shaped(draft_shape.dynamic(2, 2, 4)), acceptance.naive()),
  "typical": (drafters.model(MODEL, 3), acceptance.typical()),
  "multipath": (shaped(CHAINS), acceptance.multipath()),
  "traversal": (
    shaped(draft_shape.static([-1, 0, 0, 1, 1])),
    acceptance.traversal(),
  ),
}
# Drafts that decide their length, and those of no model.
BY_REJECTION = {
  "adaptive": shaped(draft_length.adaptive(3, (1, 1.01, 1.02, 1.03))),
  "entropy": shaped(draft_length.entropy(3, 0.5)),
  "hybrid": drafters.fallback(drafters.suffix(2), drafters.recycling(V, 3)),
  "translated": drafters.translated(translated_test.DRAFT, 3),
}
TRANSLATED = translated_test.params(translated_test.PARTED)


def generate(way, params=None, **options):
  params = params or (TRANSLATED if way == "translated" else PARAMS)
  if way in BY_REJECTION:
    drafter, rule = BY_REJECTION[way], acceptance.rejection()
  else:
    drafter, rule = WAYS[way]
  temperature = np.array([1.0, 0.7, 0.0, 1.0])
  options = {"temperature": temperature, "params": params} | options
  return table_loop.generate(rule, drafter, **options)


def stream(*args, **options):
  return list(decode.stream(*args, **options))


ONES = jnp.ones(4)


@functools.cache
def honest(way):
  return generate(way)


@pytest.mark.parametrize("way", [*WAYS, *BY_REJECTION])
def test_64_bits_and_debug_nans_change_nothing(way):
  expected = honest(way)
  with jax.enable_x64(True), jax.debug_nans(True):
    state = generate(way)
  for name in ("tokens", "length", "origin", "log_probs"):
    one, other = getattr(state, name), getattr(expected, name)
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other, name)


def broken(params, value):
  """Weights with `value` in every distribution after token 2."""
  return {"table": params["table"].at[:, 2, 1].set(value)}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "typical"])
def test_a_row_stops_before_a_distribution_that_is_not_finite(way, value):
  """And only that row: its text so far is what a sound model writes."""
  state = generate(way, PARAMS._replace(target=broken(PARAMS.target, value)))
  sound = honest(way)
  assert bool(jnp.all(state.done))
  for row in range(4):
    text, length = np.asarray(state.tokens[row]), int(state.length[row])
    start = LENGTH[row] - 1  # the pending token has no distribution yet
    assert 2 not in text[start : length - 1]
    if text[length - 1] == 2:
      assert length == 12 or state.fault[row] == TARGET_FAULT
    else:
      assert state.fault[row] == NO_FAULT and length == 12
    if way in ("baseline", "lookup"):
      np.testing.assert_array_equal(text[:length], sound.tokens[row, :length])
  assert state.fault[0] == TARGET_FAULT and int(state.length[0]) == 3
  assert int(state.stats.emitted[0]) == 0


@pytest.mark.parametrize("size", [4, 4096])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_one_broken_logit_breaks_its_distribution(size, filters):
  """A maximum over 4096 tokens, vectorised on a CPU, passes over nan."""
  values = jnp.array([0.0, jnp.nan, jnp.inf] * 2)
  logits = jax.random.normal(jax.random.key(0), (6, size))
  logits = logits.at[:, size // 2].add(values)
  temperature = np.repeat([0.0, 0.5], 3)
  settings = sampling.settings(6, temperature, **filters)
  distribution = np.asarray(jax.jit(sampling.warp)(logits, settings))
  sound = np.array([0, 3])
  assert np.isnan(np.delete(distribution, sound, 0)).all()
  assert not np.isnan(distribution[sound]).any()


def flat_model(size):
  """Distributions that are its parameters, whatever the past is."""

  def apply(params, tokens, cache, *, head=True, parents=None, **_):
    shape = (*tokens.shape, size)
    return ModelOutput(jnp.broadcast_to(params, shape), None), cache

  return Model(apply, MODEL.init_cache, size, 1)


@pytest.mark.parametrize("rule", [acceptance.rejection, acceptance.block])
def test_a_large_vocabulary_hides_no_broken_draft(rule):
  size = 4096
  model = flat_model(size)
  logits = jnp.zeros(size)
  params = Params(logits, logits.at[::2].set(jnp.nan))
  state = decode.generate(
    model,
    drafters.model(model, 2),
    rule(),
    params,
    jnp.zeros((2, 3), jnp.int32),
    jnp.array([3, 3]),
    jax.random.key(0),
    max_length=8,
    sampling=sampling.settings(2, [0.0, 1.0]),
  )
  assert bool(jnp.all(state.fault == DRAFT_FAULT))
  np.testing.assert_array_equal(state.length, 3)


def test_block_follows_the_target_up_to_a_broken_distribution():
  """Else the prefix that ends there was always kept: chi-square 778."""
  rows = 40_000
  state = generate(
    "block",
    PARAMS._replace(target=broken(PARAMS.target, np.nan)),
    prompt=jnp.tile(jnp.array([[0, 1]]), (rows, 1)),
    prompt_length=jnp.full((rows,), 2),
    key=jax.random.key(7),
    max_length=4,
    sampling=sampling.settings(rows, 1.0),
  )
  exact = np.asarray(jax.nn.softmax(PARAMS.target["table"][0, 1]), float)
  counts = np.bincount(np.asarray(state.tokens[:, 2]), minlength=V)
  assert stats.chisquare(counts, rows * exact / exact.sum()).pvalue > 1e-4


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
  "way", ["rejection", "block", "kseq", "tree", "traversal", "multipath"]
)
def test_a_draft_that_is_not_finite_stops_the_row(way, value):
  params = PARAMS._replace(draft=broken(PARAMS.draft, value))
  for temperature in (0.0, 1.0):
    state = generate(way, params, temperature=temperature)
    assert state.fault[0] == DRAFT_FAULT and int(state.length[0]) == 3
    assert bool(jnp.all(state.done))


@pytest.mark.parametrize(
  "sentence, options",
  [
    ("prompt is float64; it must be int", {"prompt": PROMPT.astype(float)}),
    ("prompt is bool", {"prompt": PROMPT > 0}),
    (r"prompt has shape \(3,\); it must be \[B, P\]", {"prompt": PROMPT[0]}),
    (r"prompt has shape \(4, 0\)", {"prompt": PROMPT[:, :0]}),
    (r"token id = 4; it must be in 0\.\.3", {"prompt": PROMPT + 2}),
    ("token id = -1", {"prompt": PROMPT - 1}),
    (r"prompt_length has shape \(2,\)", {"prompt_length": LENGTH[:2]}),
    (r"prompt_length = 0; it must be in 1\.\.3", {"prompt_length": LENGTH - 1}),
    (r"limit has shape \(1,\); it must be \(4,\)", {"limit": jnp.array([9])}),
    (
      r"sampling\.temperature has shape \(3,\); it must be \(4,\)",
      {"sampling": sampling.settings(3, 1.0)},
    ),
    ("index = -1; it must be in 0", {"index": np.arange(4) - 1}),
    ("index = 4294967297", {"index": np.full(4, 2**32 + 1)}),
    ("limit = 1099511627776; it must be in 0", {"limit": np.full(4, 2**40)}),
    ("eos_ids is float64; it must be integers", {"eos_ids": [1.5]}),
    ("eos_ids = 4294967297", {"eos_ids": [2**32 + 1]}),
    ("max_length = 1000000000000", {"max_length": 10**12}),
    ("max_length is 2", {"max_length": 2}),
    ("max_length is 2", {"max_length": 2, "decoded": stream}),
    ("every = 0; it must be >= 1", {"every": 0, "decoded": stream}),
    ("temperature = nan", {"sampling": Sampling(jnp.full(4, jnp.nan))}),
    ("top_p = nan", {"sampling": Sampling(ONES, top_p=jnp.nan * ONES)}),
    ("key is not one JAX random key", {"key": 7}),
    ("key is not one JAX random key", {"key": jnp.float32(1)}),
    ("key is not one JAX", {"key": jax.random.split(jax.random.key(0))}),
  ],
)
def test_arguments_that_are_refused(sentence, options):
  with pytest.raises(ValueError, match=sentence):
    generate("lookup", **options)


def test_lists_will_do():
  lists = {"prompt": PROMPT.tolist(), "prompt_length": LENGTH.tolist()}
  state = generate("lookup", index=[0, 1, 2, 3], **lists)
  np.testing.assert_array_equal(state.tokens, honest("lookup").tokens)


def test_weights_of_64_bits_are_refused():
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), PARAMS)
    with pytest.raises(ValueError, match=r"target\['table'\] is float64"):
      generate("rejection", wide)
