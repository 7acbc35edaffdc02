"""Mixture-of-experts MLP with top-k routing and no token dropping.

Routes as Mixtral does (arXiv:2401.04088): softmax over all experts, then the k
most probable, weighted by their probabilities. Invariant: a token's output does
not depend on its neighbours, so speculation stays lossless.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec.models.config import TransformerConfig
from specdec.models.layouts import project

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "relu": jax.nn.relu,
}

# Jitted, so that eager callers too compile one program for each shape.
normal = jax.jit(nn.initializers.normal(0.02), static_argnums=(1, 2))


def weight(module: nn.Module, shape: tuple[int, ...], dtype) -> jax.Array:
  """Returns the parameter `weight` of a module, [out, in] or packed."""

  def init():
    return normal(module.make_rng("params"), shape, jnp.dtype(dtype))

  # module.param would reject the shape of a packed weight.
  return module.variable("params", "weight", init).value


class Weight(nn.Module):
  """Holds the parameter `weight`, so that its path ends like Linear's."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self, dtype) -> jax.Array:
    return weight(self, self.shape, dtype)


class Experts(nn.Module):
  """Sums the outputs of the experts that a router chooses for each token.

  Runs every expert on every token, weighting most outputs by zero; for few
  tokens it gathers only the weights of the chosen experts.
  """

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    up_shape = (c.num_experts, c.mlp_width, c.width)
    router = Weight((c.num_experts, c.width), name="router")(x.dtype)
    gate = Weight(up_shape, name="gate")(x.dtype)
    up = Weight(up_shape, name="up")(x.dtype)
    down = Weight((c.num_experts, c.width, c.mlp_width), name="down")(x.dtype)
    activate = ACTIVATIONS[c.activation]

    flat = x.reshape(-1, c.width)  # [N, M]
    scores = project(router, flat[None])[0]
    probs = jax.nn.softmax(scores.astype(jnp.float32))
    gates, chosen = jax.lax.top_k(probs, c.experts_per_token)  # [N, k]
    if c.normalize_experts:
      gates /= jnp.sum(gates, -1, keepdims=True)
    gates = gates.astype(x.dtype)
    if 2 * chosen.size <= c.num_experts:
      # Copying the chosen experts reads less memory than running all of them.
      gate, up, down = gate[chosen], up[chosen], down[chosen]  # [N, k, ., .]
      inner = activate(jnp.einsum("nkim,nm->nki", gate, flat))
      inner *= jnp.einsum("nkim,nm->nki", up, flat)
      y = jnp.einsum("nkmi,nki->nkm", down, inner)
      y = jnp.einsum("nkm,nk->nm", y, gates)
    else:
      one_hot = jax.nn.one_hot(chosen, c.num_experts, dtype=x.dtype)
      weights = jnp.einsum("nke,nk->en", one_hot, gates)  # [E, N], mostly zero
      inner = activate(jnp.einsum("eim,nm->ein", gate, flat))
      inner *= jnp.einsum("eim,nm->ein", up, flat)
      y = jnp.einsum("emi,ein->emn", down, inner)
      y = jnp.sum(y * weights[:, None], 0).T
    return y.reshape(x.shape)
