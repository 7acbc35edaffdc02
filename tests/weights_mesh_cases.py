"""Quantised weights on eight virtual devices; run by mesh_test.py."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from specdec import checkpoints, sharding
from specdec.benchmark import abstract
from specdec.benchmark.setup import Setup
from specdec.compiled import memory_plan
from specdec.models import params as model_params
from specdec.models import weight_formats
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat

SMALL = dict(target="stdlib-1m", drafter="lookup", k=3, max_new_tokens=32)
CONFIG = TransformerConfig(
  vocab_size=64,
  num_layers=1,
  width=64,
  mlp_width=128,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
)


def texts(setup):
  decoder = setup.load()
  [batch] = decoder.encode(["def total(numbers):\n", "import os\n"])
  return decoder.decode(batch).texts


@pytest.mark.parametrize(
  "weights", ["int8", pytest.param("int4(group=32)", marks=pytest.mark.slow)]
)
def test_eight_devices_write_what_one_writes(weights):
  setup = Setup(weights=weights, batch=2, **SMALL)
  meshed = dataclasses.replace(setup, mesh="data:2,model:2")
  if "int4" in weights and jax.__version_info__ < (0, 12):
    with pytest.raises(ValueError, match=r"need JAX 0\.12"):
      meshed.load()
  else:
    assert texts(meshed) == texts(setup)


def config_with(weights):
  form = weight_formats.parse(weights)
  return dataclasses.replace(CONFIG, weights=form)


@pytest.mark.parametrize("weights", ["int8", "int8(group=16)"])
def test_values_lie_with_their_scales(tmp_path, weights):
  """However they come to a device: drawn, quantised when read, or stored."""
  place = sharding.places("model:4", CONFIG.counts).target
  config = config_with(weights)
  alone = checkpoints.random_checkpoint(config, 1)
  checkpoints.save_safetensors(tmp_path, alone.params, config)
  (tmp_path / "tokenizer_config.json").write_text("{}")
  whole = model_params.shardings(config, place)
  for loaded in (
    checkpoints.random_checkpoint(config, 1, place=place),
    checkpoints.load(tmp_path, place=place, weights=WeightFormat("stored")),
  ):
    chex.assert_trees_all_equal(loaded.params, alone.params)
    assert jax.tree.map(lambda x: x.sharding, loaded.params) == whole
  down = loaded.params["layer_0"]["mlp"]["down"]["weight"]
  part = down.values.sharding.shard_shape(down.values.shape)
  assert part == (64, 32)
  groups = down.scale.sharding.shard_shape(down.scale.shape)[1]
  assert groups == (1 if weights == "int8" else 2)
  held = sum(
    np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(loaded.params)
  )
  assert memory_plan.weight_bytes(config, place) == held


def test_groups_are_not_cut():
  place = sharding.places("model:8", CONFIG.counts).target
  with pytest.raises(ValueError) as error:
    model_params.shardings(config_with("int8(group=32)"), place)
  sentence = "8 devices do not divide its 2 groups of int8(group=32)"
  assert sentence in str(error.value)


def test_a_quantised_draft_of_shapes_alone_is_shared_out():
  setup = Setup(
    "preset:llama3-1b",
    drafter="quantized",
    random_weights=True,
    mesh="model:8",
  )
  target = abstract.target(setup)
  drafter = abstract.drafter(setup, target)
  part = sum(
    np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(drafter.params)
  )
  whole = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(drafter.params)
  )
  assert part == pytest.approx(whole / 8, rel=0.01)
  planned = abstract.plan(setup, target, drafter).parts["drafter"]
  assert planned == pytest.approx(part, rel=0.01)
