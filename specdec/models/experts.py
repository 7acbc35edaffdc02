"""Mixture-of-experts MLP with top-k routing and no token dropping.

Routes as Mixtral does (arXiv:2401.04088): softmax over all experts, then the k
most probable, weighted by their probabilities; or as GroupRouting says.
Invariant: a token's output does
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
from specdec.models.parts import GroupRouting

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "relu": jax.nn.relu,
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

ROUTES = "routes"  # collection of what tokens choose, where one asks for it
LOOP = "chosen_experts"  # name of the loop over them in compiled programs


def gated(config: TransformerConfig, gate: jax.Array, up: jax.Array):
  """Returns the inner values of a gated MLP (arXiv:2002.05202)."""
  limit = config.swiglu_limit
  if limit is not None:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1
  return ACTIVATIONS[config.activation](gate) * up


# Jitted, so that eager callers too compile one program for each shape.
normal = jax.jit(nn.initializers.normal(0.02), static_argnums=(1, 2))


def weight(
  module: nn.Module, shape: tuple[int, ...], dtype, name: str = "weight"
) -> jax.Array:
  """Returns the parameter `name` of a module, [out, in] or packed."""

  def init():
    return normal(module.make_rng("params"), shape, jnp.dtype(dtype))

  # module.param would reject the shape of a packed weight.
  return module.variable("params", name, init).value


class Weight(nn.Module):
  """Holds the parameter `weight`, so that its path ends like Linear's."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self, dtype) -> jax.Array:
    return weight(self, self.shape, dtype)


class Affine(nn.Module):
  """Holds `weight` [..., out, in], and `bias` [..., out] or None."""

  shape: tuple[int, ...]
  bias: bool

  @nn.compact
  def __call__(self, dtype) -> tuple[jax.Array, jax.Array | None]:
    bias = None
    if self.bias:
      shape = self.shape[:-1]
      bias = self.param("bias", nn.initializers.zeros, shape, dtype)
    return weight(self, self.shape, dtype), bias


def route(
  scores: jax.Array, bias: jax.Array, routing: GroupRouting, count: int
) -> tuple[jax.Array, jax.Array]:
  """Chooses `count` experts a token by groups.

  Args:
    scores: [B, T, E] float32, before the sigmoid.
    bias: [E], added for the choice alone.

  Returns:
    Their sigmoids and numbers, [B, T, count] each.
  """
  affinities = jax.nn.sigmoid(scores)
  grouped = affinities + bias[None, None]
  grouped = grouped.reshape(*scores.shape[:-1], routing.groups, -1)
  of_groups = jax.lax.top_k(grouped, 2)[0].sum(-1)  # [B, T, groups]
  _, groups = jax.lax.top_k(of_groups, routing.groups_per_token)
  is_open = jax.nn.one_hot(groups, routing.groups, dtype=bool).any(-2)
  ranked = jnp.where(is_open[..., None], grouped, -jnp.inf)
  _, chosen = jax.lax.top_k(ranked.reshape(scores.shape), count)
  return jnp.take_along_axis(affinities, chosen, axis=-1), chosen


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
    down_shape = (c.num_experts, c.width, c.mlp_width)

    def held(name, *shape):
      return Affine(shape, c.expert_biases, name=name)(x.dtype)

    router, router_bias = held("router", c.num_experts, c.width)
    gate, gate_bias = held("gate", *up_shape)
    up, up_bias = held("up", *up_shape)
    down, down_bias = held("down", *down_shape)
    biases = () if gate_bias is None else (gate_bias, up_bias)

    # Routing by groups was trained with float32 scores and biases.
    scores = project(router, x, jnp.float32 if c.routing else None)
    if router_bias is not None:
      scores += router_bias[None, None]
    scores = scores.astype(jnp.float32)
    if c.routing:
      zeros, shape = nn.initializers.zeros, (c.num_experts,)
      bias = self.param("choice_bias", zeros, shape, jnp.float32)
      gates, chosen = route(scores, bias, c.routing, c.experts_per_token)
    elif c.route_inputs:
      gates, chosen = jax.lax.top_k(scores, c.experts_per_token)  # [B, T, k]
      gates = jax.nn.sigmoid(gates)
    else:
      probs = jax.nn.softmax(scores)
      gates, chosen = jax.lax.top_k(probs, c.experts_per_token)
    if c.normalize_experts and not c.route_inputs:
      gates /= jnp.sum(gates, -1, keepdims=True) + 1e-20  # of what underflows
    if c.routing:
      gates *= c.routing.scale
    one_hot = jax.nn.one_hot(chosen, c.num_experts, dtype=bool)
    # [B, T, E], mostly zero.
    weights = jnp.sum(jnp.where(one_hot, gates[..., None], 0), axis=-2)
    is_chosen = jnp.any(one_hot, axis=-2)
    if not self.is_initializing():  # where flax has shapes alone
      self.sow(ROUTES, "is_chosen", is_chosen)
    matrices = gate, up, down, *biases
    if in_training:
      y = self.run_all(x, weights, *matrices)
    else:
      axes, of_token = ("experts", "expert_mlp"), ("rows", None, "experts")
      # Every device has experts of its own, or a part of each.
      of_down = "experts", None, "expert_mlp"
      of_matrices = axes, axes, of_down, *[axes] * len(biases)
      run = self.place.on_each(
        self.run_chosen,
        (("rows",), of_token, of_token, *of_matrices),
        ("rows",),
        sums=axes,
      )
      y = run(x, weights, is_chosen, *matrices)
    if down_bias is not None:
      y += jnp.einsum("bte,em->btm", weights, down_bias).astype(y.dtype)
    return y

  def run_all(self, x, weights, gate, up, down, *biases):
    """Runs every expert on every token."""
    first, second = (jnp.einsum("eim,btm->btei", w, x) for w in (gate, up))
    if biases:
      first += biases[0][None, None]
      second += biases[1][None, None]
    weights = weights[..., None].astype(x.dtype)
    if self.config.route_inputs:
      inner = gated(self.config, weights * first, weights * second)
    else:
      inner = gated(self.config, first, second) * weights
    return jnp.einsum("emi,btei->btm", down, inner)

  def run_chosen(self, x, weights, is_chosen, gate, up, down, *biases):
    """Runs the chosen experts, one after another, on all tokens.

    A token adds 0 for those that it has not chosen, so that its output depends
    on no other token.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights = weights.reshape(-1, weights.shape[-1])
    is_chosen = is_chosen.reshape(weights.shape)
    touched = jnp.any(is_chosen, axis=0)  # [E]
    order = jnp.argsort(~touched, stable=True)

    def add(i, y):
      def matrix(x):
        return jax.lax.dynamic_index_in_dim(x, order[i], keepdims=False)

      first, second = (project(matrix(w), flat) for w in (gate, up))
      if biases:
        first += matrix(biases[0])[None]
        second += matrix(biases[1])[None]
      weight, chosen = weights[:, order[i], None], is_chosen[:, order[i], None]
      if self.config.route_inputs:
        first, second = (weight.astype(x.dtype) * z for z in (first, second))
        weight = 1.0
      inner = gated(self.config, first, second)
      out = project(matrix(down), inner, jnp.float32)
      return y + jnp.where(chosen, weight * out, 0)

    y = jnp.zeros(flat.shape, jnp.float32)
    with jax.named_scope(LOOP):
      y = jax.lax.fori_loop(0, jnp.sum(touched), add, y)
    return y.astype(x.dtype).reshape(x.shape)
