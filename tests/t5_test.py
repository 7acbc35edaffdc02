"""Encoder-decoders: sources beside prompts, decoders, refusals, meshes.

Logits are compared with transformers' in transformer_test, drafters are checked
by the kit in conformance_test.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  Setup,
  acceptance,
  checkpoints,
  decode,
  drafters,
  sampling,
  step,
)
from specdec.benchmark import differences
from specdec.compiled import memory_plan
from specdec.models import transformer
from specdec.types import Params, Source

CONFIG = learned_kinds.T5
SOURCE = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (4, 11))
LENGTHS = np.array([11, 1, 5, 8])
ROWS = len(LENGTHS)


@functools.cache
def pair():
  """(model, params) of a target that drafts for itself, somewhat changed."""
  params = jax.tree.map(
    lambda x: 4 * x, transformer.init_params(CONFIG, jax.random.key(0))
  )
  draft = jax.tree.map(
    lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), params
  )
  return transformer.model(CONFIG), Params(params, draft)


def generate(
  drafter=None, rule=None, source=SOURCE, lengths=LENGTHS, **options
):
  model, params = pair()
  batch = len(lengths)
  return decode.generate(
    model,
    drafter or decode.NO_DRAFTER,
    rule or decode.NO_DRAFT_RULE,
    params,
    jnp.zeros((batch, 1), jnp.int32),
    jnp.ones((batch,), jnp.int32),
    jax.random.key(2),
    max_length=30,
    sampling=sampling.settings(batch, 1.0),
    source=Source(jnp.asarray(source), jnp.asarray(lengths)),
    **options,
  )


def test_padding_and_neighbours_of_a_source_change_nothing():
  expected = generate()
  dirty = SOURCE.copy()
  dirty[np.arange(11)[None] >= LENGTHS[:, None]] = 3
  np.testing.assert_array_equal(generate(source=dirty).tokens, expected.tokens)
  for row in range(ROWS):
    alone = generate(
      source=SOURCE[row : row + 1, : LENGTHS[row]],
      lengths=LENGTHS[row : row + 1],
      index=jnp.array([row]),
    )
    np.testing.assert_array_equal(alone.tokens[0], expected.tokens[row])
  # And what is not padding does.
  other = SOURCE.copy()
  other[:, 0] = (other[:, 0] + 1) % CONFIG.vocab_size
  changed = np.any(generate(source=other).tokens != expected.tokens, axis=1)
  assert changed.all()


def test_an_encoder_scales_its_embedding():
  """As a decoder: all options of a config are independent."""
  model, params = pair()
  scaled = transformer.model(dataclasses.replace(CONFIG, scale_embedding=True))
  source = Source(jnp.asarray(SOURCE), jnp.asarray(LENGTHS))
  grown = jax.tree.map(lambda x: x * CONFIG.width**0.5, params.target["embed"])
  chex.assert_trees_all_close(
    jax.jit(scaled.encode)(params.target, source),
    jax.jit(model.encode)(params.target | {"embed": grown}, source),
    atol=1e-4,
  )


def test_the_bias_of_an_encoder_is_the_same_in_every_row():
  model, params = pair()
  source = Source(jnp.asarray(SOURCE), jnp.asarray(LENGTHS))
  jaxpr = jax.make_jaxpr(model.encode)(params.target, source)
  shapes = {
    x.aval.shape
    for equation in jaxpr.eqns
    if equation.primitive.name == "gather"
    for x in equation.outvars
  }
  positions, heads = SOURCE.shape[1], CONFIG.num_heads
  assert (1, positions, positions, heads) in shapes
  assert (ROWS, positions, positions, heads) not in shapes


def test_lookup_copies_from_the_source():
  """A text that repeats its source is drafted from it, a row at its length."""
  model, params = pair()
  drafter = drafters.lookup(3, ngram=2, min_ngram=2)
  source = Source(jnp.asarray(SOURCE), jnp.asarray(LENGTHS))
  text = np.zeros((ROWS, 20), np.int32)
  text[:, 1:3] = [SOURCE[0, 4:6], [1, 1], SOURCE[2, 1:3], SOURCE[3, 5:7]]
  state = decode.start(
    model,
    drafter,
    acceptance.coupled(),
    params,
    jnp.asarray(text),
    jnp.full((ROWS,), 3),
    jax.random.key(0),
    max_length=20,
    sampling=sampling.settings(ROWS, 0.0),
    source=source,
  )
  context = step.context_of(state, model.vocab_size, acceptance.coupled())
  draft, _ = drafter.propose(params, None, context)
  np.testing.assert_array_equal(draft.count, [4, 1, 4, 4])
  np.testing.assert_array_equal(draft.tokens[0, 1:], SOURCE[0, 6:9])
  np.testing.assert_array_equal(draft.tokens[2, 1:3], SOURCE[2, 3:5])
  assert draft.tokens[2, 3] == 0  # the output's first token follows the source
  np.testing.assert_array_equal(
    draft.tokens[3, 1:], [SOURCE[3, 7], 0, *text[3, 1:2]]
  )


def test_what_does_not_go_together_is_refused():
  model, params = pair()
  one = dict(
    prompt=jnp.zeros((1, 1), jnp.int32),
    prompt_length=jnp.ones((1,), jnp.int32),
    key=jax.random.key(0),
    max_length=5,
    sampling=sampling.settings(1, 0.0),
  )
  source = Source(jnp.zeros((1, 3), jnp.int32), jnp.array([3]))
  with pytest.raises(ValueError, match="an encoder-decoder: give source"):
    decode.autoregress(model, params, **one)
  with pytest.raises(ValueError, match=r"source.length = 4; .* in 1\.\.3"):
    wrong = source._replace(length=jnp.array([4]))
    decode.autoregress(model, params, **one, source=wrong)
  with pytest.raises(ValueError, match=r"source has shape \(2, 3\); it must b"):
    wrong = source._replace(tokens=jnp.zeros((2, 3), jnp.int32))
    decode.autoregress(model, params, **one, source=wrong)
  llama, weights = learned_kinds.target()
  with pytest.raises(ValueError, match="a decoder alone: it has no use for"):
    decode.autoregress(llama, Params(weights), **one, source=source)
  with pytest.raises(ValueError, match="the draft is an encoder-decoder and"):
    decode.generate(
      llama,
      drafters.model(model, 2),
      acceptance.rejection(),
      Params(weights, params.draft),
      **one,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The target as a directory."""
  path = tmp_path_factory.mktemp("t5")
  checkpoints.save_safetensors(path, pair()[1].target, CONFIG)
  return path


@pytest.mark.parametrize(
  "drafter, mesh",
  [
    ("lookup(ngram=2, min_ngram=1)", None),
    ("early_exit(2)", "data:1,model:1"),
  ],
)
def test_setups_decode_what_the_baseline_does(folder, drafter, mesh):
  decoder = Setup(
    target=str(folder),
    drafter=drafter,
    acceptance="coupled",
    k=3,
    temperature=1.0,
    batch=2,
    prompt_size=64,
    max_new_tokens=20,
    mesh=mesh,
  ).load()
  assert decoder.max_length == 21
  rows = [SOURCE[i, :n].tolist() for i, n in enumerate(LENGTHS)]
  for batch in decoder.encode(rows):
    ours, theirs = (x.complete(batch) for x in (decoder, decoder.baseline()))
    assert ours.texts == theirs.texts
    assert all(len(text) == 20 for text in ours.texts)
    assert ours.stats.nodes.sum() > 0
  assert drafter.startswith("lookup") or ours.num_rounds < theirs.num_rounds
  text = differences.first_difference(decoder, rows[0], [1, 2], [1, 3], 0)
  assert text.startswith("prompt 0 leaves it at new token 1, where")


def test_a_plan_counts_the_source():
  """Its keys and values for every decoder layer, and the encoder's pass."""
  shape = dict(batch=2, max_length=20, num_nodes=4, prompt_size=500)
  base = memory_plan.plan(CONFIG, None, **shape).parts
  more = memory_plan.plan(CONFIG, None, **shape | {"prompt_size": 600}).parts
  extra = 2 * 100 * CONFIG.cache_bytes_per_token
  assert more["KV caches"] - base["KV caches"] == extra
  wider = dataclasses.replace(CONFIG, encoder_layers=5)
  layers = memory_plan.plan(wider, None, **shape).parts["target"]
  assert layers - base["target"] == 4 * (
    wider.num_parameters - CONFIG.num_parameters
  )
