"""Rotary embeddings of positions (arXiv:2104.09864), in float32."""

import math

import jax
import jax.numpy as jnp

from specdec.models.config import TransformerConfig
from specdec.models.rope_scaling import LongRope, Scaling, Yarn


def rope_frequencies(
  theta: float, dims: int, scaling: Scaling | None
) -> jax.Array:
  """Returns the scaled rotary frequencies, [dims / 2] rad per position."""
  frequency = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
  if scaling is None:
    return frequency
  if isinstance(scaling, LongRope):
    return frequency / jnp.asarray(scaling.factors, jnp.float32)
  if isinstance(scaling, Yarn):
    unscaled = 1 - _yarn_ramp(theta, dims, scaling)
  elif scaling.kind == "linear":
    return frequency / scaling.factor
  else:
    turns = scaling.original_length * frequency / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled = jnp.clip((turns - low) / max(high - low, 1e-6), 0.0, 1.0)
  return unscaled * frequency + (1 - unscaled) * frequency / scaling.factor


def _yarn_ramp(theta: float, dims: int, scaling: Yarn) -> jax.Array:
  """Returns how far each pair's frequency is interpolated, [dims / 2] of 0..1.

  The ends are clipped as in the reference implementation, by dims.
  """

  def pair_that_turns(times: float) -> float:
    turns = scaling.original_length / (times * 2 * math.pi)
    return dims * math.log(turns) / (2 * math.log(theta))

  first, last = map(pair_that_turns, (scaling.beta_fast, scaling.beta_slow))
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, dims - 1)
  width = last - first if last != first else 1e-3
  pair = jnp.arange(dims // 2, dtype=jnp.float32)
  return jnp.clip((pair - first) / width, 0.0, 1.0)


def rope_angles(
  config: TransformerConfig, position: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
  """Returns (cos, sin) at position [B, T], each [B, T, 1, dims / 2].

  The sliding window of the layer selects the rotary base. Both are multiplied
  by the scaling's attention factor.
  """
  theta, scaling = config.rope_theta, config.rope_scaling
  if window is not None and config.local_rope_theta is not None:
    theta, scaling = config.local_rope_theta, None
  dims = config.rotary_dims or config.head_dim
  frequency = rope_frequencies(theta, dims, scaling)
  angle = position[:, :, None, None].astype(jnp.float32)
  angle *= frequency[None, None, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  if scaling is None or scaling.attention_factor == 1:
    return cos, sin
  return scaling.attention_factor * cos, scaling.attention_factor * sin


def rotate(
  x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False
) -> jax.Array:
  """Rotates pairs (i, i + dims / 2) of the first dims of x [B, T, H, dim], or
  pairs (2i, 2i + 1)."""
  dims = 2 * cos.shape[-1]
  turned = x[..., :dims].astype(jnp.float32)
  if interleaved:
    first, second = turned[..., ::2], turned[..., 1::2]
  else:
    first, second = jnp.split(turned, 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  if interleaved:
    rotated = [jnp.stack(rotated, axis=-1).reshape(turned.shape)]
  if dims < x.shape[-1]:
    rotated.append(x[..., dims:].astype(jnp.float32))
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
