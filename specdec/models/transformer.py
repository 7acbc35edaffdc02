"""Flax decoder for the Llama, Qwen, Mixtral and Gemma families.

Weights are [out, in] as in checkpoints, or packed by models/layouts.py. Norms,
rotary angles, softmax and logits are float32 in either dtype. `place`
constrains the sharding of activations (sharding.py): heads, inner MLP columns
and vocabulary are split over `model`; the residual stream is replicated.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import cache as kv
from specdec import sharding
from specdec.models.attention import View, attend, softcap, view
from specdec.models.config import RopeScaling, TransformerConfig
from specdec.models.experts import ACTIVATIONS, Experts, weight
from specdec.models.layouts import look_up, project, project_all
from specdec.types import KVCache, Model, ModelOutput, Skip
from specdec.utils.constructors import cached

Place = Callable[..., jax.Array]  # (x, *names of its axes) -> x


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
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
    scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
    return (y * scale).astype(x.dtype)


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


class Attention(nn.Module):
  """Grouped-query attention over cache slots, after writing this call's KV.

  Call arguments: x [B, T, M]; layer, (keys, values) of the cache or None;
  angles from `rope_angles`; view, what the tokens attend to.
  """

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x, layer, angles, view: View):
    c = self.config
    batch, num_tokens, _ = x.shape

    def layer_of(name, count):
      return Linear(count * c.head_dim, c.qkv_bias, name=name)

    def heads(y, axis):
      y = y.reshape(batch, num_tokens, -1, c.head_dim)
      return self.place(y, "rows", None, axis, None)

    query, key, value = linear(
      x,
      layer_of("q", c.num_heads),
      layer_of("k", c.num_kv_heads),
      layer_of("v", c.num_kv_heads),
    )
    query, key = heads(query, "query"), heads(key, "key")
    if c.qk_norm:
      query = RMSNorm(c.norm_epsilon, c.norm_offset, name="q_norm")(query)
      key = RMSNorm(c.norm_epsilon, c.norm_offset, name="k_norm")(key)
    query, key = rotate(query, *angles), rotate(key, *angles)
    value = heads(value, "key")
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    if layer is not None:
      axes = sharding.CACHE, sharding.CACHE, ("rows",)
      write = self.place.on_each(kv.write, axes, sharding.CACHE)
      keys = write(layer[0], keys, view.slot)
      values = write(layer[1], values, view.slot)
    elif view.mask is None:
      view = view.masked(num_tokens)

    y = attend(
      query,
      keys,
      values,
      view,
      scale=(c.query_scalar or c.head_dim) ** -0.5,
      cap=c.attention_softcap,
      on_mesh=self.place is not sharding.anywhere,
    )
    y = self.place(y, "rows", None, "query")
    return Linear(c.width, name="o")(y), (keys, values)


class MLP(nn.Module):
  """Gated feed-forward (arXiv:2002.05202)."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gate, up = linear(
      x,
      Linear(self.config.mlp_width, name="gate"),
      Linear(self.config.mlp_width, name="up"),
    )
    inner = ACTIVATIONS[self.config.activation](gate) * up
    inner = self.place(inner, "rows", None, "mlp")
    return Linear(self.config.width, name="down")(inner)


class Layer(nn.Module):
  """Pre-norm decoder layer; the residual stream bypasses disabled sublayers."""

  config: TransformerConfig
  place: Place = sharding.anywhere
  has_attention: bool = True
  has_mlp: bool = True

  @nn.compact
  def __call__(self, x, layer, angles, view: View):
    c = self.config
    norm = functools.partial(RMSNorm, c.norm_epsilon, c.norm_offset)
    if self.has_attention:
      y = norm(name="attention_norm")(x)
      attention = Attention(c, self.place, name="attention")
      y, layer = attention(y, layer, angles, view)
      y = self.place(y, "rows", None, None)  # sums over the devices of heads
      x = x + (norm(name="attention_post_norm")(y) if c.post_norms else y)
    if self.has_mlp:
      y = norm(name="mlp_norm")(x)
      if c.num_experts:
        y = Experts(c, name="mlp")(y)
      else:
        y = MLP(c, self.place, name="mlp")(y)
      y = self.place(y, "rows", None, None)
      x = x + (norm(name="mlp_post_norm")(y) if c.post_norms else y)
    return x, layer


class Embedding(nn.Module):
  """Embedding table [V, M], for token lookup and for projection to logits."""

  config: TransformerConfig

  def setup(self):
    shape = (self.config.vocab_size, self.config.width)
    self.weight = weight(self, shape, self.config.dtype)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = look_up(self.weight, tokens)  # [B, T, M]
    return x.astype(self.config.dtype)

  def logits(self, x: jax.Array) -> jax.Array:
    return project(self.weight, x, jnp.float32)  # [B, T, V]


class Transformer(nn.Module):
  """Decoder; see `types.Model.apply` for the arguments of a call."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    cache: KVCache | None,
    *,
    parents: jax.Array | None = None,
    first: int = 0,
    start: int = 0,
    stop: int | None = None,
    hidden: jax.Array | None = None,
    head: bool = True,
    features: tuple[int, ...] = (),
    skip: Skip | None = None,
  ) -> tuple[ModelOutput, KVCache]:
    c = self.config
    stop = c.num_layers if stop is None else stop
    num_tokens = tokens.shape[1]
    if cache is None:  # training: the tokens attend to each other only
      length = jnp.zeros(tokens.shape[:1], jnp.int32)
      layers = [None] * c.num_layers
    else:
      length, layers = cache.length, list(cache.layers)
    windows = c.windows or (None,) * c.num_layers
    views = {
      window: view(length, parents, first, num_tokens, window)
      for window in set(windows[start:stop])
    }
    angles = {w: rope_angles(c, v.positions, w) for w, v in views.items()}

    embed = Embedding(c, name="embed")
    x = embed(tokens) if start == 0 else hidden
    x = self.place(x, "rows", None, None)
    if start == 0 and c.scale_embedding:
      x *= jnp.asarray(c.width**0.5, x.dtype)  # rounded to dtype, as trained
    residuals = {}  # layer -> residual stream entering it
    for i in range(start, stop):
      residuals[i] = x
      runs = (True, True) if skip is None else tuple(i not in s for s in skip)
      x, layers[i] = Layer(c, self.place, *runs, name=f"layer_{i}")(
        x, layers[i], angles[windows[i]], views[windows[i]]
      )
    residuals[stop] = x
    normed = RMSNorm(c.norm_epsilon, c.norm_offset, name="final_norm")(x)
    logits = None
    if head:
      table = embed if c.tied else Embedding(c, name="head")
      logits = softcap(table.logits(normed), c.logit_softcap)
      logits = self.place(logits, "rows", None, "vocab")
    output = ModelOutput(logits, normed, tuple(residuals[i] for i in features))
    if cache is not None:
      cache = cache.replace(layers=tuple(layers))
    return output, cache


@cached
def model(config: TransformerConfig, place: Place | None = None) -> Model:
  """Builds a decoder; `place` is a sharding.Placement, None for one device."""
  place = place or sharding.anywhere
  module = Transformer(config, place)

  def apply(params, tokens, cache, **options):
    return module.apply({"params": params}, tokens, cache, **options)

  def init_cache(batch: int, slots: int) -> KVCache:
    cache = kv.init(
      batch,
      slots,
      config.num_layers,
      config.num_kv_heads,
      config.head_dim,
      jnp.dtype(config.dtype),
    )
    layers = jax.tree.map(lambda x: place(x, *sharding.CACHE), cache.layers)
    return cache.replace(layers=layers)

  return Model(apply, init_cache, config.vocab_size, config.num_layers)


def init_params(config: TransformerConfig, key: jax.Array):
  """Draws random weights N(0, 0.02^2), with norms set to one.

  Outside jit the tensors are drawn one at a time, since the random bits of all
  of them together take several times their memory.
  """
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  return Transformer(config).lazy_init(key, tokens, None)["params"]
