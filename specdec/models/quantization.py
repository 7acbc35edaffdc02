"""Matrices of eight or four bits a weight, for targets and for drafts.

A group of consecutive inputs of an output shares one scale, and its weights are
multiples of it, plus an offset in some files: w = scale * values + offset.
Activations and sums stay float32. On a CPU the kernels of models/cpu_kernels.py
multiply the integers as they are stored; elsewhere XLA converts them on the way
into the product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Quantized(NamedTuple):
  """A matrix [out, in] as integers and scales.

  Attributes:
    values: [out, in] int8, int4 or uint4; or packed [out / 32, in, 32], of four
      bits two a byte: [out / 32, in, 16] int8, or uint8 of uint4.
    scale: [out, groups] float32, or packed [out / 32, groups, 32].
    offset: as scale; None for zeros.
  """

  values: jax.Array
  scale: jax.Array
  offset: jax.Array | None = None


def quantize(weight: jax.Array, group: int = 256, bits: int = 8) -> Quantized:
  """Rounds a matrix to int8 or int4, the largest weight of a group to 127 or 7.

  Args:
    weight: [out, in].
    group: the largest divisor of `in` up to this is how many inputs share a
      scale.
    bits: 8 or 4.
  """
  outputs, inputs = weight.shape
  group = largest_divisor(inputs, group)
  parts = weight.astype(jnp.float32).reshape(outputs, -1, group)
  scale = jnp.max(jnp.abs(parts), axis=2) / (2 ** (bits - 1) - 1)
  values = jnp.round(parts / jnp.where(scale > 0, scale, 1)[..., None])
  values = values.reshape(outputs, inputs).astype(jnp.int8)
  return Quantized(values if bits == 8 else values.astype(jnp.int4), scale)


def largest_divisor(number: int, limit: int) -> int:
  """Returns the largest divisor of a number up to a limit."""
  return next(n for n in range(min(limit, number), 0, -1) if number % n == 0)


def dequantize(weight: Quantized, dtype=jnp.float32) -> jax.Array:
  """Returns rows [..., in] of what weights that are not packed stand for."""
  values, scale, offset = weight
  parts = values.astype(jnp.float32).reshape(*scale.shape, -1)
  parts = parts * scale[..., None]
  if offset is not None:
    parts += offset[..., None]
  return parts.reshape(values.shape).astype(dtype)
