"""Mixture of experts: several gated MLPs a layer, a few of them a token.

Top-k routing as in Mixtral (arXiv:2401.04088): softmax over all experts, the k
most probable, their probabilities as weights. Nothing is dropped, so a token's
result does not depend on its neighbours: speculation stays lossless.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec.models.config import TransformerConfig

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


# One program a shape, even where the caller is not compiled.
normal = jax.jit(nn.initializers.normal(0.02), static_argnums=(1, 2))


class Weight(nn.Module):
  """A weight of its own name; the path of a checkpoint's tensor."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self, dtype) -> jax.Array:
    return self.param("weight", normal, self.shape, jnp.dtype(dtype))


class Experts(nn.Module):
  """Weighted sum of the MLPs that a router chooses for each token.

  Many tokens pass through every expert, most of them weighted with zero: right
  and simple, not fast. Few tokens read the experts chosen for them.
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
    distribution = jax.nn.softmax(
      jnp.einsum("em,nm->ne", router, flat).astype(jnp.float32)
    )
    share, chosen = jax.lax.top_k(distribution, c.experts_per_token)  # [N, k]
    if c.normalize_experts:
      share /= jnp.sum(share, -1, keepdims=True)
    share = share.astype(x.dtype)
    if 2 * chosen.size <= c.num_experts:
      # Few tokens: a copy of the chosen experts is less to read than all.
      gate, up, down = gate[chosen], up[chosen], down[chosen]  # [N, k, ., .]
      inner = activate(jnp.einsum("nkim,nm->nki", gate, flat))
      inner *= jnp.einsum("nkim,nm->nki", up, flat)
      y = jnp.einsum("nkmi,nki->nkm", down, inner)
      y = jnp.einsum("nkm,nk->nm", y, share)
    else:
      hits = jax.nn.one_hot(chosen, c.num_experts, dtype=x.dtype)
      weights = jnp.einsum("nke,nk->en", hits, share)  # [E, N], mostly zero
      inner = activate(jnp.einsum("eim,nm->ein", gate, flat))
      inner *= jnp.einsum("eim,nm->ein", up, flat)
      y = jnp.einsum("emi,ein->emn", down, inner)
      y = jnp.sum(y * weights[:, None], 0).T
    return y.reshape(x.shape)
