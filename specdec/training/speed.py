"""Measures the speed of a training step relative to a matrix product.

Invariant: both are timed in the same process, without compilation.
"""

import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec.models.config import TransformerConfig

_SIZE = 2048  # of the square matrices, which exceed every cache


class Speed(NamedTuple):
  """Medians over repeats."""

  seconds: float  # of a step
  tokens_per_second: float
  flops: float  # FLOP/s of a step
  gemm_flops: float  # FLOP/s of a product of two square float32 matrices


def flops_per_token(config: TransformerConfig, sequence: int) -> float:
  """Counts FLOPs of forward and backward pass for one token.

  Six for each weight, plus those of causal attention over `sequence` tokens.
  """
  attention = config.num_layers * config.num_heads * config.head_dim * sequence
  return 6 * (config.num_parameters + attention)


def measure(
  step, state, frozen, batch, config: TransformerConfig, repeats: int
) -> Speed:
  """Times a training step and a matrix product in turns.

  Args:
    step: from `loop.make_step`; donates `state`.
    batch: [B, T+1] ids.
    repeats: timed steps; each is followed by five products.
  """
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
