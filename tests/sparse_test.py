"""Drafting with part of the target's KV cache."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec.benchmark.setup import Setup
from specdec.models import attention, transformer
from specdec.models.config import TransformerConfig
from specdec.roofline import chips, drafter_cost
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.roofline.shapes import of_config
from specdec.types import Params, Sparse

CONFIG = TransformerConfig(
  vocab_size=23,
  num_layers=2,
  width=32,
  mlp_width=48,
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
)
LENGTH = 40


@functools.cache
def accepted(drafter):
  """(share of draft tokens accepted, text) of greedy decoding."""
  model = transformer.model(CONFIG)
  params = transformer.init_params(CONFIG, jax.random.key(0))
  params = jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, params)
  prompts = jax.random.randint(jax.random.key(1), (4, 9), 0, 23)
  state = decode.generate(
    model,
    drafter(model),
    acceptance.coupled(),
    Params(params),
    np.asarray(prompts),
    np.full(4, 9),
    jax.random.key(2),
    max_length=LENGTH,
    sampling=sampling.settings(4, 0.0),
  )
  drafted = np.sum(state.stats.drafted)
  return np.sum(state.stats.accepted) / drafted, np.asarray(state.tokens)


def test_a_window_over_the_whole_text_drafts_the_target_s_own():
  def plain(_):
    return decode.NO_DRAFTER

  def narrow(model):
    return drafters.sparse(model, Sparse(2, 0), 3)

  def wide(model):
    return drafters.sparse(model, Sparse(LENGTH), 3)

  def reaching(model):  # sinks that meet the window
    return drafters.sparse(model, Sparse(3, LENGTH), 3)

  _, text = accepted(plain)
  shares = {}
  for name, make in dict(narrow=narrow, wide=wide, reach=reaching).items():
    shares[name], own = accepted(make)
    np.testing.assert_array_equal(own, text)
  assert shares["wide"] == shares["reach"] > 0.9  # limits cut the last drafts
  assert shares["narrow"] < 0.8


def test_a_draft_step_reads_its_positions_whatever_the_context():
  target = Deployment(of_config(CONFIG), chips.get("v5e"), kv="float32")
  layer = 2 * CONFIG.head_dim * 4  # bytes of a cached position
  cost = drafter_cost.sparse(CONFIG, Sparse(60, 4))

  def read(context):
    [(_, times, pass_cost), *_] = round_cost(target, cost, 1, 1, context).parts
    assert times == 1
    return next(t.bytes for t in pass_cost.terms if t.name == "KV read")

  assert read(30) == 2 * layer * 30
  assert read(1000) == read(4000) == 2 * layer * 63  # the token's own is new
  small = drafter_cost.quantized(CONFIG, 16, 8, Sparse(60, 4)).shape
  assert [layer.window.size for layer in small.layers] == [64, 64]


@pytest.mark.parametrize("context", [0, 7, 23, 24, 30, 100])
@pytest.mark.parametrize(
  "kind", [{}, {"windows": (24,)}, {"windows": (24,), "chunked": True}]
)
def test_the_price_counts_the_positions_that_a_node_sees(kind, context):
  """Sinks are of layers that see all positions, chunks end by themselves."""
  config = dataclasses.replace(CONFIG, num_layers=1, **kind)
  bound = "chunk" if config.chunked else "window"
  bounds = {bound: config.windows[0]} if config.windows else {}
  view = attention.View(
    np.array([context]), 0, np.zeros((1, 1), int), None, **bounds
  )
  for positions in Sparse(5, 2), Sparse(30, 2):
    mask = view.sparse(positions).mask_of(np.arange(context + 1))
    [layer] = drafter_cost.sparse(config, positions).shape.layers
    assert layer.window.cached(context) == np.sum(mask) - 1


@pytest.mark.parametrize(
  "drafter, complaint",
  [
    ("sparse(window=0)", "window = 0; it must be in 1.."),
    ("sparse(sinks=-1)", "sinks = -1; it must be in 0..512"),
    ("quantized(window=0)", "window = 0; it must be in 1.."),
    ("quantized(sinks=2)", "sinks=2 needs a window"),
    ("sparse(budget=3)", "budget"),
  ],
)
def test_refusals(drafter, complaint):
  with pytest.raises(ValueError, match=complaint):
    Setup(drafter=drafter, max_new_tokens=4).load()


@pytest.mark.parametrize(
  "drafter", ["sparse(window=64)", "quantized(window=64, sinks=2)"]
)
def test_a_setup_drafts_with_it(drafter):
  setup = Setup(drafter=drafter, k=3, max_new_tokens=24)
  decoder = setup.load()
  assert decoder.drafter.cost.is_complete
  [batch] = decoder.encode(["def add(a, b):\n  return a"])
  ours, plain = (x.complete(batch) for x in (decoder, decoder.baseline()))
  np.testing.assert_array_equal(ours.texts, plain.texts)


def test_layers_with_a_window_of_their_own_have_no_sinks():
  config = dataclasses.replace(CONFIG, windows=(None, 8))
  layers = drafter_cost.sparse(config, Sparse(20, 4)).shape.layers
  assert [x.window.size for x in layers] == [24, 8]
