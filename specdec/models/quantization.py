"""Matrices of eight bits a weight, for targets and for drafts of themselves.

A group of consecutive inputs of an output shares one scale, and its weights are
rounded to multiples of it: w = scale * values. Activations and sums stay
float32. On a CPU the kernels of models/cpu_kernels.py multiply the integers as
they are stored; elsewhere XLA converts them on the way into the product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Quantized(NamedTuple):
  """A matrix [out, in] as integers and scales.

  Attributes:
    values: [out, in] int8, or packed [out / 32, in, 32].
    scale: [out, groups] float32, or packed [out / 32, groups, 32].
  """

  values: jax.Array
  scale: jax.Array


def quantize(weight: jax.Array, group: int = 256) -> Quantized:
  """Rounds a matrix to int8, the largest weight of a group to 127.

  Args:
    weight: [out, in].
    group: the largest divisor of `in` up to this is how many inputs share a
      scale.
  """
  outputs, inputs = weight.shape
  group = next(n for n in range(min(group, inputs), 0, -1) if inputs % n == 0)
  parts = weight.astype(jnp.float32).reshape(outputs, -1, group)
  scale = jnp.max(jnp.abs(parts), axis=2) / 127
  values = jnp.round(parts / jnp.where(scale > 0, scale, 1)[..., None])
  return Quantized(values.reshape(outputs, inputs).astype(jnp.int8), scale)


def dequantize(weight: Quantized, dtype=jnp.float32) -> jax.Array:
  """Returns rows [..., in] of what weights that are not packed stand for."""
  values, scale = weight
  parts = values.reshape(*scale.shape, -1) * scale[..., None]
  return parts.reshape(values.shape).astype(dtype)
