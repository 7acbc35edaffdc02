"""How fast a training step is, beside a plain matrix product's rate.

Invariant: both are timed in the same process, compilation left out.
"""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec.models.config import TransformerConfig

_SIZE = 2048  # of the square product: well past every cache


class Speed(NamedTuple):
  """Medians."""

  seconds: float  # of a step
  tokens_per_second: float
  flops: float  # per second, of a step
  gemm_flops: float  # per second, of a product of two float32 squares


def flops_per_token(config: TransformerConfig, sequence: int) -> float:
  """Of forward and backward: six a weight, and causal attention's own."""
  attention = config.num_layers * config.num_heads * config.head_dim * sequence
  return 6 * (config.num_parameters + attention)


def measure(
  step, state, frozen, batch, config: TransformerConfig, repeats: int
) -> Speed:
  """Times `step` on one batch [B, T+1] and a product; `state` is donated."""
  square = jnp.ones((_SIZE, _SIZE), jnp.float32)
  product = jax.jit(jnp.matmul)
  jax.block_until_ready(product(square, square))
  state, measures = step(state, frozen, batch)
  jax.block_until_ready(measures)
  steps, products = [], []
  for _ in range(repeats):
    begin = time.perf_counter()
    state, measures = step(state, frozen, batch)
    jax.block_until_ready((state, measures))
    steps.append(time.perf_counter() - begin)
    for _ in range(5):
      begin = time.perf_counter()
      jax.block_until_ready(product(square, square))
      products.append(time.perf_counter() - begin)
  seconds = statistics.median(steps)
  tokens = batch.shape[0] * (batch.shape[1] - 1)
  return Speed(
    seconds,
    tokens / seconds,
    tokens * flops_per_token(config, batch.shape[1] - 1) / seconds,
    2 * _SIZE**3 / statistics.median(products),
  )
