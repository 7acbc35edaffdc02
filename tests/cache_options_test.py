"""Caches as a setup asks: keys and values in eight bits, fewer slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families import PARITY, decoded, recorded
from specdec import cache as kv
from specdec.benchmark import deployments
from specdec.benchmark.setup import Setup
from specdec.models import attention, presets, transformer
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment, pass_bound
from specdec.types import Int8Slots
from texts import forward, texts

CHIP = chips.get("v5e")
SLOTS, LENGTHS = 3 * attention.BLOCK, (700, 1100)
TREE = np.array([-1, 0, 0, 1], np.int32)


def random(seed, shape):
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(x, jnp.float32)


def read(slots):
  return slots.values * slots.scale


def test_a_slot_holds_what_was_written_whatever_lies_beside_it():
  x = 10.0 ** random(0, (2, 3, 4, 1)) * random(1, (2, 3, 4, 8))
  x = x.at[0, 0, 0].set(0.0)
  rounded = kv.round_to_int8(x)
  most = np.abs(x).max(-1, keepdims=True)
  assert np.all(np.abs(read(rounded) - x) <= most / 254 * 1.001)
  assert np.all(np.abs(rounded.values).max(-1)[most[..., 0] > 0] == 127)
  cache = kv.init(2, 16, 1, 3, (8, 8), jnp.int8)
  buffer, slot = cache.layers[0][0], jnp.array([5, 9])
  one = kv.write(kv.write(buffer, x, slot), 99 * x[:, :, :1], slot + 4)
  for row, start in enumerate((5, 9)):
    for x_of, ours in zip(
      (rounded.values, rounded.scale), (one.values, one.scale)
    ):
      np.testing.assert_array_equal(ours[row, :, start : start + 4], x_of[row])


@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("slots", [SLOTS, 64])
def test_attention_is_that_over_what_the_slots_stand_for(
  parents, window, slots
):
  """By the kernel where there is one, and by XLA in one block and several."""
  lengths = jnp.array(LENGTHS if slots == SLOTS else (9, 40), jnp.int32)
  query = random(0, (2, 4, 4, 64))
  held = [kv.round_to_int8(random(i, (2, 2, slots, 64))) for i in (1, 2)]
  view = attention.view(lengths, parents, 0, 4, window)
  expected = attention.attend(query, *map(read, held), view, scale=1 / 8)
  for on_mesh in (False, True):
    y = attention.attend(query, *held, view, scale=1 / 8, on_mesh=on_mesh)
    np.testing.assert_allclose(y, expected, atol=2e-6)


# Plain, with windows and sinks, with a latent vector, with recurrent layers.
@pytest.mark.parametrize(
  "name, drafter",
  [
    ("qwen3_yarn", "model"),
    ("qwen3_yarn", "tree"),
    ("qwen3_yarn", "mtp"),
    ("gpt_oss", "early_exit"),
    ("deepseek_v3", "tree"),
    pytest.param("qwen3_next", "model", marks=pytest.mark.slow),
  ],
)
def test_coupled_text_is_autoregressive_text(name, drafter):
  state = decoded(name, drafter, kv="int8")
  assert texts(state) == texts(decoded(name, "baseline", kv="int8"))
  assert state.stats.accepted.sum() > 0
  layers = [x for x in state.target_cache.layers if isinstance(x, tuple)]
  assert all(isinstance(x, Int8Slots) for pair in layers for x in pair)


def test_eight_bits_are_close_and_not_the_same():
  loaded, rounded = recorded("qwen3_yarn"), recorded("qwen3_yarn", kv="int8")
  tokens = np.random.default_rng(0).integers(0, 64, (2, 20))
  exact, ours = (
    forward(transformer.model(x.config), x.params, tokens)
    for x in (loaded, rounded)
  )
  error = np.abs(ours - exact)
  assert 0 < error.mean() < 0.02 * exact.std()


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "qwen3-30b-a3b"])
def test_the_cache_is_priced_as_it_is_held(name):
  config = dataclasses.replace(presets.get(name, "bfloat16"), kv="int8")
  batch, slots = 2, 64
  cache = jax.eval_shape(
    lambda: transformer.model(config).init_cache(batch, slots)
  )
  held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
  assert held == batch * slots * config.cache_bytes_per_token
  deployment = Deployment(shapes.of_config(config), chips.get("v5p"))
  assert deployment.cache_bytes(batch, slots) == held
  wide = dataclasses.replace(config, kv=None)
  saved = (
    pass_bound(wide, 1, 1, 1000).bytes - pass_bound(config, 1, 1, 1000).bytes
  )
  per_token = wide.cache_bytes_per_token - config.cache_bytes_per_token
  assert saved == pytest.approx(1001 * per_token, rel=1e-6) and saved > 0


@pytest.mark.parametrize("target, draft", [("int8", None), (None, "int8")])
def test_target_and_draft_may_differ(target, draft):
  call = f"model(stdlib-1m, kv={draft})" if draft else "model(stdlib-1m)"
  setup = Setup("stdlib-11m", call, k=2, kv=target, max_new_tokens=12)
  decoder = setup.load()
  [batch] = decoder.encode(["def a1(x):"])
  state = decoder.start(batch)
  for cache, kind in (
    (state.target_cache, target),
    (state.draft_state.cache, draft),
  ):
    is_int8 = {isinstance(x, Int8Slots) for pair in cache.layers for x in pair}
    assert is_int8 == {kind == "int8"}
  ours, theirs = (
    x.complete(batch).texts for x in (decoder, decoder.baseline())
  )
  assert ours == theirs
  names = [
    one.name for one in deployments.passes_of(setup, setup.load_target(), CHIP)
  ]
  plain = dataclasses.replace(setup, kv=None, drafter="model(stdlib-1m)")
  others = [
    one.name for one in deployments.passes_of(plain, plain.load_target(), CHIP)
  ]
  differing = [name != other for name, other in zip(names, others, strict=True)]
  assert differing == [target == "int8", draft == "int8"]
  with pytest.raises(ValueError, match="kv 'int4' is unknown; known: int8"):
    Setup("stdlib-11m", kv="int4")


def test_recurrent_layers_keep_slots_for_as_many_tokens_as_asked():
  name = str(PARITY / "qwen3_next")
  few, many = (
    Setup(name, "lookup(min_ngram=1)", k=6, num_nodes=n, max_new_tokens=8)
    for n in (4, 16)
  )
  with pytest.raises(ValueError, match=r"for 4 tokens .* larger num_nodes"):
    few.load().complete(few.load().encode([[1, 2, 3, 1, 2]])[0])
  decoder = many.load()
  [batch] = decoder.encode([[1, 2, 3, 1, 2]])
  ours, theirs = (x.complete(batch) for x in (decoder, decoder.baseline()))
  assert ours.texts == theirs.texts
  with pytest.raises(ValueError, match="4: the target has no recurrent layers"):
    Setup("stdlib-1m", num_nodes=4).check_sources()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
  """Else a poisoned row would write on, with keys of zeros."""
  x = random(0, (1, 2, 3, 8)).at[0, 0, 1, 4].set(bad)
  read_back = read(kv.round_to_int8(x))
  assert np.all(np.isnan(read_back[0, 0, 1]))
  assert np.all(np.isfinite(np.delete(read_back.reshape(6, 8), 1, axis=0)))
