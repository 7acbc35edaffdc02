"""Mixture-of-experts MLP with top-k routing and no token dropping.

Routes as Mixtral does (arXiv:2401.04088): softmax over all experts, then the k
most probable, weighted by their probabilities. Invariant: a token's output does
not depend on its neighbours, so speculation stays lossless.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.models.config import TransformerConfig
from specdec.models.layouts import project

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "relu": jax.nn.relu,
}

LOOP = "chosen_experts"  # name of the loop over them in compiled programs

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

  Call arguments: x [B, T, M]; in_training, whether gradients are taken: then
  every expert runs on every token. In decoding each expert that some token has
  chosen is read once.
  """

  config: TransformerConfig
  place: Callable[..., jax.Array] = sharding.anywhere

  @nn.compact
  def __call__(self, x: jax.Array, in_training: bool) -> jax.Array:
    c = self.config
    up_shape = (c.num_experts, c.mlp_width, c.width)
    router = Weight((c.num_experts, c.width), name="router")(x.dtype)
    gate = Weight(up_shape, name="gate")(x.dtype)
    up = Weight(up_shape, name="up")(x.dtype)
    down = Weight((c.num_experts, c.width, c.mlp_width), name="down")(x.dtype)

    scores = project(router, x)
    probs = jax.nn.softmax(scores.astype(jnp.float32))
    gates, chosen = jax.lax.top_k(probs, c.experts_per_token)  # [B, T, k]
    if c.normalize_experts:
      gates /= jnp.sum(gates, -1, keepdims=True)
    one_hot = jax.nn.one_hot(chosen, c.num_experts, dtype=bool)
    # [B, T, E], mostly zero.
    weights = jnp.sum(jnp.where(one_hot, gates[..., None], 0), axis=-2)
    is_chosen = jnp.any(one_hot, axis=-2)
    if in_training:
      return self.run_all(x, weights, gate, up, down)
    axes, of_token = ("experts", "expert_mlp"), ("rows", None, "experts")
    # Every device has experts of its own, or a part of each.
    run = self.place.on_each(
      self.run_chosen,
      (("rows",), of_token, of_token, axes, axes, ("experts", None, axes[1])),
      ("rows",),
      sums=axes,
    )
    return run(x, weights, is_chosen, gate, up, down)

  def run_all(self, x, weights, gate, up, down):
    """Runs every expert on every token."""
    activate = ACTIVATIONS[self.config.activation]
    inner = activate(jnp.einsum("eim,btm->btei", gate, x))
    inner *= jnp.einsum("eim,btm->btei", up, x)
    inner *= weights[..., None].astype(x.dtype)
    return jnp.einsum("emi,btei->btm", down, inner)

  def run_chosen(self, x, weights, is_chosen, gate, up, down):
    """Runs the chosen experts, one after another, on all tokens.

    A token adds 0 for those that it has not chosen, so that its output depends
    on no other token.
    """
    activate = ACTIVATIONS[self.config.activation]
    flat = x.reshape(-1, x.shape[-1])
    weights = weights.reshape(-1, weights.shape[-1])
    is_chosen = is_chosen.reshape(weights.shape)
    touched = jnp.any(is_chosen, axis=0)  # [E]
    order = jnp.argsort(~touched, stable=True)

    def add(i, y):
      def matrix(x):
        return jax.lax.dynamic_index_in_dim(x, order[i], keepdims=False)

      inner = activate(project(matrix(gate), flat))
      inner *= project(matrix(up), flat)
      out = project(matrix(down), inner, jnp.float32)
      weight, chosen = weights[:, order[i], None], is_chosen[:, order[i], None]
      return y + jnp.where(chosen, weight * out, 0)

    y = jnp.zeros(flat.shape, jnp.float32)
    with jax.named_scope(LOOP):
      y = jax.lax.fori_loop(0, jnp.sum(touched), add, y)
    return y.astype(x.dtype).reshape(x.shape)
