"""Packed weights give the logits of unpacked ones."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models import cpu_kernels, layouts, transformer
from specdec.models.config import TransformerConfig

CONFIG = TransformerConfig(
  vocab_size=48,
  num_layers=2,
  width=32,
  mlp_width=40,  # no multiple of 16: gate and up stay as they are
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)


@pytest.mark.parametrize(
  "tied, batch, num_tokens", [(True, 1, 1), (False, 3, 2), (True, 2, 70)]
)
def test_same_logits(tied, batch, num_tokens):
  config = dataclasses.replace(CONFIG, tied=tied, qkv_bias=True)
  params = jax.tree.map(
    lambda x: 10 * x, transformer.init_params(config, jax.random.key(0))
  )
  packed = layouts.pack(jax.tree.map(jnp.copy, params), "cpu")
  assert packed["embed"]["weight"].shape == (3, 32, 16)
  assert packed["layer_1"]["attention"]["o"]["weight"].shape == (1, 32, 32)
  assert packed["layer_1"]["attention"]["k"]["weight"].shape == (1, 32, 16)
  assert packed["layer_1"]["mlp"]["up"]["weight"].shape == (40, 32)
  assert packed["layer_1"]["attention"]["k"]["bias"].shape == (16,)
  tokens = jax.random.randint(jax.random.key(1), (batch, num_tokens), 0, 48)
  apply = jax.jit(transformer.model(config).apply)
  cache = transformer.model(config).init_cache(batch, 80)
  expected, _ = apply(params, tokens, cache)
  actual, _ = apply(packed, tokens, cache)
  assert jnp.std(expected.logits) > 1
  np.testing.assert_allclose(actual.logits, expected.logits, atol=3e-3)


def test_experts_stay_as_they_are():
  config = dataclasses.replace(CONFIG, num_experts=16, experts_per_token=2)
  params = transformer.init_params(config, jax.random.key(0))
  packed = layouts.pack(jax.tree.map(jnp.copy, params), "cpu")
  for name in ("gate", "up", "down"):
    chex.assert_trees_all_equal(
      packed["layer_0"]["mlp"][name], params["layer_0"]["mlp"][name]
    )


@pytest.mark.parametrize(
  "outputs, block", [(192, 64), (96, 32), (48, 16), (40, None)]
)
def test_the_largest_block_that_fits(outputs, block):
  if block == 64 and cpu_kernels.available():
    block = cpu_kernels.BLOCK
  matrix = jnp.arange(outputs * 4.0).reshape(outputs, 4)
  packed = layouts.pack({"q": {"weight": matrix}}, "cpu")["q"]["weight"]
  assert packed.shape == ((outputs // block, 4, block) if block else (40, 4))
  tokens = jnp.array([[0, outputs - 1, 17]])
  np.testing.assert_array_equal(layouts.look_up(packed, tokens), matrix[tokens])


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_other_backends_get_what_they_had(backend):
  params = transformer.init_params(CONFIG, jax.random.key(0))
  assert layouts.pack(params, backend) is params
