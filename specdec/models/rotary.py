"""Rotary embeddings of positions (arXiv:2104.09864), in float32."""

import jax
import jax.numpy as jnp

from specdec.models.config import TransformerConfig
from specdec.models.rope_scaling import RopeScaling


def rope_frequencies(
  theta: float, head_dim: int, scaling: RopeScaling | None
) -> jax.Array:
  """Returns the scaled rotary frequencies, [head_dim / 2] rad per position."""
  frequency = theta ** (
    -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  )
  if scaling is None:
    return frequency
  if scaling.kind == "linear":
    return frequency / scaling.factor
  turns = scaling.original_length * frequency / (2 * jnp.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  unscaled = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return unscaled * frequency + (1 - unscaled) * frequency / scaling.factor


def rope_angles(
  config: TransformerConfig, position: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
  """Returns (cos, sin) at position [B, T], each [B, T, 1, head_dim / 2].

  The sliding window of the layer selects the rotary base.
  """
  theta, scaling = config.rope_theta, config.rope_scaling
  if window is not None and config.local_rope_theta is not None:
    theta, scaling = config.local_rope_theta, None
  frequency = rope_frequencies(theta, config.head_dim, scaling)
  angle = position[:, :, None, None].astype(jnp.float32)
  angle *= frequency[None, None, None]
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + dim / 2) of x [B, T, H, dim] (arXiv:2104.09864)."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
