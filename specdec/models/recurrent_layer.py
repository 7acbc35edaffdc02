"""The recurrent sublayer of a decoder layer; its algorithm is recurrence.py."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.models import recurrence
from specdec.models.attention import View
from specdec.models.config import TransformerConfig
from specdec.models.linear import Linear, linear
from specdec.models.parts import GATED_DELTA, Recurrence
from specdec.types import PyTree, RecurrentState

_KEYS, _HEADS = ("rows", None, "state_key"), ("rows", None, "state")


class Recurrent(nn.Module):
  """Gated delta rule or Mamba-2 in the place of attention (recurrence.py).

  On a mesh every device has heads and rows of its own, and the recurrence needs
  no others. Call arguments: x [B, T, M]; layer, what the cache keeps, or None;
  view, of the nodes.
  """

  config: TransformerConfig
  place: Callable[..., jax.Array] = sharding.anywhere

  @nn.compact
  def __call__(self, x, layer: RecurrentState | None, view: View):
    c, r = self.config, self.config.recurrence
    is_delta = r.kind == GATED_DELTA
    parts = {
      "q": (r.num_key_heads, r.key_dim),
      "k": (r.num_key_heads, r.key_dim),
      "v": (r.num_heads, r.value_dim),
    }
    inner = r.num_heads * r.value_dim

    def linear_to(**sizes):
      return linear(x, *(Linear(n, name=name) for name, n in sizes.items()))

    wide = {name: heads * dim for name, (heads, dim) in parts.items()}
    *mixed, gate = linear_to(**wide, gate=inner)
    rate = None
    if is_delta:
      decay, rate = linear_to(decay=r.num_heads, rate=r.num_heads)
      rate = jax.nn.sigmoid(rate.astype(jnp.float32))
    else:
      [decay] = linear_to(decay=r.num_heads)

    def per_head(name, init=nn.initializers.zeros):  # [1, 1, heads]
      value = self.param(name, init, (r.num_heads,), x.dtype)
      return value.astype(jnp.float32)[None, None]

    step = jax.nn.softplus(decay.astype(jnp.float32) + per_head("decay_bias"))
    decay = -jnp.exp(per_head("log_decay")) * step  # [B, T, heads]

    mixed = tuple(
      y.reshape(*y.shape[:2], *shape).swapaxes(1, 2)
      for y, shape in zip(mixed, parts.values())
    )
    names = sharding.RECURRENT.inputs
    inputs = self.on_each(recurrence.inputs, view, layer is not None)
    seen, ready = inputs(layer, mixed, names, names)
    query, key, value = (
      ShortConvolution(r.kernel, r.conv_bias, name=f"{name}_conv")(
        part, x.dtype
      )
      for name, part in zip(parts, seen)
    )
    if is_delta:
      query, key = recurrence.unit(query), recurrence.unit(key)
      query *= r.key_dim**-0.5
      into_state = value
    else:
      into_state = step[..., None] * value
    nodes = recurrence.Nodes(query, key, into_state, decay, rate)
    names = recurrence.Nodes(
      _KEYS, _KEYS, _HEADS, _HEADS, None if rate is None else _HEADS
    )
    is_kept = layer is not None and x.shape[1] <= r.num_nodes
    run = self.on_each(recurrence.run, view, is_kept)
    y, after = run(ready, nodes, names, _HEADS)
    if not is_delta:
      y += per_head("skip", nn.initializers.ones)[..., None] * value
    groups = None if is_delta else r.num_key_heads
    y = GatedNorm(c.norm_epsilon, groups, name="norm")(y, gate, x.dtype)
    y = self.place(y, *_HEADS)
    return Linear(c.width, name="o")(y), after if is_kept else layer

  def on_each(self, f: Callable, view: View, is_kept: bool) -> Callable:
    """Returns recurrence.inputs or run, by every device on its own part.

    Args:
      is_kept: it returns a layer.

    Returns:
      (layer, new, names of the axes of `new`, names of the result's) -> result,
      layer.
    """
    tree = {"depth": view.depth}
    if view.ancestors is not None:
      tree["ancestors"] = view.ancestors
    own = {
      name: ("rows",) if len(x) == len(view.length) else ()
      for name, x in tree.items()
    }

    def on_part(length, tree, layer, new):
      where = view._replace(length=length, **tree)
      return f(layer, new, where, self.config.recurrence)

    def run(layer, new: PyTree, names: PyTree, result: PyTree):
      kept = None if layer is None else sharding.RECURRENT
      after = sharding.RECURRENT if is_kept else None
      mapped = self.place.on_each(
        on_part, (("rows",), own, kept, names), (result, after)
      )
      return mapped(view.length, tree, layer, new)

    return run


def make_room(
  place: Callable[..., jax.Array],
  layers: Sequence[RecurrentState],
  view: View,
  r: Recurrence,
) -> list[RecurrentState]:
  """Runs recurrence.make_room, by every device on its own part."""
  size = view.depth.shape[1]
  if not layers or size > r.num_nodes:  # a long text's nodes are not kept
    return list(layers)
  names = [sharding.RECURRENT] * len(layers)
  run = place.on_each(
    lambda length, layers: recurrence.make_room(layers, length, size, r),
    (("rows",), names),
    names,
  )
  return run(view.length, list(layers))


class ShortConvolution(nn.Module):
  """Causal convolution of channels one by one, then SiLU; in float32."""

  kernel: int
  bias: bool

  @nn.compact
  def __call__(self, seen: jax.Array, dtype) -> jax.Array:
    """Takes [B, heads, K, T, dim], of `dtype` weights: [B, T, heads, dim]."""
    channels = seen.shape[1] * seen.shape[-1]
    shape = channels, 1, self.kernel
    kernel = self.param("kernel", nn.initializers.normal(0.02), shape, dtype)
    bias = None
    if self.bias:
      bias = self.param("bias", nn.initializers.zeros, (channels,), dtype)
    return recurrence.convolve(seen, kernel, bias)


class GatedNorm(nn.Module):
  """RMSNorm with a gate of SiLU, over heads or over groups of them.

  Of heads the gate multiplies what was normed, of groups what will be.
  """

  epsilon: float
  groups: int | None  # None: of every head, with one scale for all

  @nn.compact
  def __call__(self, y: jax.Array, gate: jax.Array, dtype) -> jax.Array:
    """Takes y [B, T, heads, dim] float32 and gate [B, T, heads * dim]."""
    shape, in_groups = gate.shape, self.groups is not None
    gate = jax.nn.silu(gate.astype(jnp.float32))
    size = (shape[-1] if in_groups else y.shape[-1],)
    scale = self.param("scale", nn.initializers.ones, size, dtype)
    scale = jnp.expand_dims(scale, tuple(range(2 if in_groups else 3)))
    if in_groups:
      y = (y.reshape(shape) * gate).reshape(*shape[:2], self.groups, -1)
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
    y = y.astype(dtype)
    if in_groups:
      return y.reshape(shape) * scale
    y = (y * scale).reshape(shape).astype(jnp.float32)
    return (y * gate).astype(dtype)
