"""Linear maps and RMSNorm, of which every layer is built.

Weights are [out, in] as in checkpoints, or packed by models/layouts.py.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec.models.experts import weight
from specdec.models.layouts import project_all


class Linear(nn.Module):
  """Linear map y = W x (+ b), with W [out, in] or packed."""

  features: int
  bias: bool = False

  def __call__(self, x: jax.Array) -> jax.Array:
    return linear(x, self)[0]

  @nn.compact
  def parameters(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Returns the weight for inputs x, and the bias."""
    bias = None
    if self.bias:
      shape = (self.features,)
      bias = self.param("bias", nn.initializers.zeros, shape, x.dtype)
    return weight(self, (self.features, x.shape[-1]), x.dtype), bias


def linear(x: jax.Array, *layers: Linear) -> list[jax.Array]:
  """Applies linear maps to the same x [B, T, in], reading them in one call."""
  weights, biases = zip(*(layer.parameters(x) for layer in layers))
  return [
    y if bias is None else y + bias[None, None]
    for y, bias in zip(project_all(weights, x), biases)
  ]


def unit_rms(x: jax.Array, epsilon: float) -> jax.Array:
  """Returns x in float32, divided by its root mean square."""
  y = x.astype(jnp.float32)
  return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + epsilon)


class RMSNorm(nn.Module):
  """Root-mean-square norm (arXiv:1910.07467), computed in float32.

  With `offset` it multiplies by 1 + scale. The parameter is scale, as in
  Gemma's checkpoints, since 1 + scale would lose bits in bfloat16.
  """

  epsilon: float
  offset: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.initializers.zeros if self.offset else nn.initializers.ones
    scale = self.param("scale", init, (x.shape[-1],), x.dtype)
    scale = scale.astype(jnp.float32)
    if self.offset:
      scale = 1 + scale
    y = unit_rms(x, self.epsilon)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    return (y * scale).astype(x.dtype)
