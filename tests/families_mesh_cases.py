"""Families of models on eight virtual devices; run by mesh_test.py."""

import chex
import jax
import numpy as np
import pytest

import learned_kinds
from families import PARITY, decoded, recorded
from specdec import checkpoints, sharding
from specdec.models import params as model_params
from texts import texts


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


# Mesh, drafter and a model with something that is new to a mesh: norms over
# heads on several devices, parts of heads, layers without rotation, windows,
# recurrent heads and groups of them, a shared expert, biases of experts.
CASES = [
  ("olmo2", "early_exit", (2, 4)),
  ("phi3_longrope", "model", (4, 2)),
  ("smollm3", "layer_skip", (2, 4)),
  ("gemma3_images", "lookup", (2, 4)),
  ("bamba", "tree", (2, 4)),
  ("qwen3_next", "early_exit", (4, 2)),
  ("gpt_oss", "early_exit", (4, 2)),
  slow("gpt_oss", "tree", (2, 4)),
  ("llama4", "tree", (4, 2)),
  slow("llama4", "early_exit", (2, 4)),
  slow("deepseek_v3", "tree", (2, 4)),
  slow("deepseek_v3", "early_exit", (4, 2)),
  slow("bamba", "model", (4, 2)),
  slow("qwen3_next", "tree", (4, 2)),
  slow("gemma3", "published_eagle3", (2, 4)),
  slow("gemma3", "published_mtp", (4, 2)),
  slow("olmo2", "published_eagle3", (4, 2)),
  slow("olmo2", "published_mtp", (2, 4)),
]


def lying(mesh, config, drafter="model"):
  text = f"data:{mesh[0]},model:{mesh[1]}"
  if not drafter.startswith("published"):
    return sharding.places(text, config.counts, config.counts)
  counts = learned_kinds.head_config("mtp").layers.counts
  return sharding.places(text, config.counts, counts, 1)


@pytest.mark.parametrize("name, drafter, mesh", CASES)
def test_eight_devices_write_what_one_writes(name, drafter, mesh):
  where = lying(mesh, recorded(name).config, drafter)
  state, alone = decoded(name, drafter, where), decoded(name, drafter)
  assert texts(state) == texts(alone)
  np.testing.assert_array_equal(state.stats.accepted, alone.stats.accepted)
  assert alone.stats.accepted.sum() > 0


def test_a_cache_in_eight_bits_is_divided_as_any():
  name, drafter = "qwen3_yarn", "tree"
  where = lying((2, 4), recorded(name).config)
  state = decoded(name, drafter, where, kv="int8")
  assert texts(state) == texts(decoded(name, "baseline", kv="int8"))
  heads = recorded(name).config.num_kv_heads
  for x in jax.tree.leaves(state.target_cache.layers):
    assert x.sharding.shard_shape(x.shape)[:2] == (4, max(1, heads // 4))


@pytest.mark.parametrize("name", ["olmo2", "phi3_window", "gemma3_images"])
def test_every_device_reads_its_part(name):
  alone = recorded(name)
  where = lying((2, 4), alone.config).target
  loaded = checkpoints.load(PARITY / name, place=where)
  chex.assert_trees_all_equal(loaded.params, alone.params)
  whole = model_params.shardings(alone.config, where)
  assert jax.tree.map(lambda x: x.sharding, loaded.params) == whole
  query = loaded.params["layer_0"]["attention"]["q"]["weight"]
  rows = alone.config.num_heads * alone.config.head_dim // 4
  assert query.sharding.shard_shape(query.shape) == (rows, 32)
