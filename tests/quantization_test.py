"""Matrices in int8, and the target that drafts for itself with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.benchmark.setup import Setup
from specdec.models import cpu_kernels, layouts, quantization, transformer
from specdec.models.config import TransformerConfig
from specdec.models.quantization import Quantized

CONFIG = TransformerConfig(
  vocab_size=64,
  num_layers=1,
  width=64,
  mlp_width=96,
  num_heads=2,
  num_kv_heads=1,
  head_dim=32,
  qkv_bias=True,
)


def matrix(outputs=64, inputs=128):
  weight = jax.random.normal(jax.random.key(0), (outputs, inputs))
  return weight.at[3].set(0.0)


@pytest.mark.parametrize(
  "group, groups", [(32, 4), (64, 2), (1000, 1), (48, 4)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_are_rounded_to_the_nearest_multiple(group, groups, bits):
  weight = matrix()
  quantized = quantization.quantize(weight, group, bits)
  assert quantized.values.dtype == {8: jnp.int8, 4: jnp.int4}[bits]
  assert quantized.scale.shape == (64, groups)
  error = abs(quantization.dequantize(quantized) - weight)
  half = np.repeat(quantized.scale / 2, 128 // groups, axis=1)
  assert np.all(error <= half * 1.001)
  largest = abs(quantized.values.astype(jnp.int32)).reshape(64, groups, -1)
  most = 2 ** (bits - 1) - 1
  assert np.all(np.delete(largest.max(2), 3, axis=0) == most)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
  "dtype, group, batch, num_tokens",
  [
    *(("int8", 32, 1, 1), ("int8", 128, 2, 7)),
    *(("int4", 128, 1, 1), ("int4", 32, 2, 7)),
    *(("uint4", 32, 1, 1), ("uint4", 128, 2, 7)),
  ],
)
def test_products_and_rows_are_those_of_the_rounded_matrix(
  dtype, group, batch, num_tokens, packed
):
  quantized = quantization.quantize(
    matrix(), group, 8 if dtype[-1] == "8" else 4
  )
  if dtype == "uint4":  # as Q4_1: from 0 on, with an offset
    values = (quantized.values.astype(jnp.int8) + 8).astype(jnp.uint4)
    offset = -8 * quantized.scale + jnp.arange(64.0)[:, None]
    quantized = Quantized(values, quantized.scale, offset)
  whole = np.float64(quantization.dequantize(quantized))
  if packed:
    quantized = layouts.pack(quantized, "cpu")
  x = jax.random.normal(jax.random.key(1), (batch, num_tokens, 128))
  y = jax.jit(layouts.project)(quantized, x)
  np.testing.assert_allclose(y, np.float64(x) @ whole.T, rtol=2e-6, atol=3e-4)
  tokens = jnp.array([[0, 63, 17], [3, 32, 31]])
  rows = layouts.look_up(quantized, tokens)
  np.testing.assert_array_equal(rows, np.float32(whole)[tokens])


@pytest.mark.parametrize("packed", [False, True])
def test_matrices_alone_are_quantised(packed):
  config = TransformerConfig(
    **{**vars(CONFIG), "num_experts": 4, "experts_per_token": 2}
  )
  params = transformer.init_params(config, jax.random.key(0))
  if packed:
    params = layouts.pack(params, "cpu")
  small = layouts.quantize(params)
  assert isinstance(small["embed"]["weight"], Quantized)
  layer, before = small["layer_0"], params["layer_0"]
  for name in "qkvo":
    weight = layer["attention"][name]["weight"]
    assert isinstance(weight, Quantized)
    fits = cpu_kernels.available() and packed
    assert weight.values.ndim == 2 + fits
  assert layer["mlp"] is before["mlp"]
  assert layer["mlp_norm"]["scale"] is before["mlp_norm"]["scale"]
  assert layer["attention"]["q"]["bias"] is before["attention"]["q"]["bias"]


@pytest.mark.parametrize(
  "drafter, temperature, kept",
  [("quantized", 1.0, 0.9), ("quantized(int4, group=32)", 0.0, 0.6)],
)
def test_the_target_in_integers_drafts_its_text(drafter, temperature, kept):
  setup = Setup(
    "stdlib-11m",
    drafter=drafter,
    k=4,
    max_new_tokens=40,
    temperature=temperature,
  )
  decoder = setup.load()
  [batch] = decoder.encode(["def total(numbers):\n"])
  speculative = decoder.decode(batch)
  assert speculative.texts == decoder.baseline().decode(batch).texts
  accepted, evaluated = speculative.stats.accepted, speculative.stats.evaluated
  assert accepted.sum() > kept * evaluated.sum() > 15
  held = sum(x.nbytes for x in jax.tree.leaves(decoder.params.draft))
  cost = decoder.drafter_cost
  assert held == pytest.approx(cost.weight_bytes, rel=0.01)  # biases, norms


@pytest.mark.parametrize(
  "drafter, sentence",
  [
    ("quantized(int3)", "quantized(int3): there are int8 and int4"),
    ("quantized(group=0)", "group=0; it must be >= 1"),
  ],
)
def test_refusals(drafter, sentence):
  with pytest.raises(ValueError) as error:
    Setup("stdlib-11m", drafter=drafter).load()
  assert sentence in str(error.value)
