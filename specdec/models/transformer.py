"""One Flax decoder for the Llama family, with an explicit cache.

Weights are [out, in], as checkpoints store them, and products are
`weight @ x.T`: tokens stand last, the layout where XLA's CPU backend takes
least longer for eight tokens than for one; on a TPU it is free. Norms,
rotary angles, softmax and logits are float32 whatever the dtype is.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from specdec import cache as kv
from specdec.models.attention import positions, visible
from specdec.models.config import RopeScaling, TransformerConfig
from specdec.types import KVCache, Model, ModelOutput


class Linear(nn.Module):
  """y = W x without bias; W is [out, in]."""

  features: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    weight = self.param(
      "weight",
      nn.initializers.normal(0.02),
      (self.features, x.shape[-1]),
      x.dtype,
    )
    return project(weight, x)


def project(weight: jax.Array, x: jax.Array, dtype=None) -> jax.Array:
  """[B, T, in] through [out, in] to [B, T, out] of `dtype`."""
  batch, num_tokens, width = x.shape
  flat = x.reshape(batch * num_tokens, width)
  y = jax.lax.dot(weight, flat.T, preferred_element_type=dtype or weight.dtype)
  return y.T.reshape(batch, num_tokens, -1)


class RMSNorm(nn.Module):
  """Root-mean-square norm (arXiv:1910.07467), computed in float32."""

  epsilon: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), x.dtype)
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
    return (y * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def rope_frequencies(
  theta: float, head_dim: int, scaling: RopeScaling | None
) -> jax.Array:
  """[head_dim / 2] radians a position, stretched as `scaling` says."""
  frequency = theta ** (
    -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  )
  if scaling is None:
    return frequency
  if scaling.kind == "linear":
    return frequency / scaling.factor
  turns = scaling.original_length * frequency / (2 * jnp.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return keep * frequency + (1 - keep) * frequency / scaling.factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotary embedding (arXiv:2104.09864) by halves.

  Args:
    x: [B, T, heads, dim].
    cos, sin: [B, T, 1, dim / 2].
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nn.Module):
  """Grouped-query attention over cache slots; writes its own K/V first."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, layer, length, angles, mask):
    c = self.config
    batch, num_tokens, _ = x.shape
    groups = c.num_heads // c.num_kv_heads

    def heads(name, count):
      y = Linear(count * c.head_dim, name=name)(x)
      return y.reshape(batch, num_tokens, count, c.head_dim)

    query = rotate(heads("q", c.num_heads), *angles)
    key = rotate(heads("k", c.num_kv_heads), *angles)
    value = heads("v", c.num_kv_heads)
    keys = kv.write(layer[0], key.swapaxes(1, 2), length)
    values = kv.write(layer[1], value.swapaxes(1, 2), length)

    # Queries of one K/V head stand together: [B, heads, groups * T, dim].
    query = query.reshape(batch, num_tokens, c.num_kv_heads, groups, -1)
    query = query.transpose(0, 2, 3, 1, 4).reshape(
      batch, c.num_kv_heads, groups * num_tokens, c.head_dim
    )
    scores = jnp.einsum(
      "bhsd,bhqd->bhsq", keys, query, preferred_element_type=jnp.float32
    ).swapaxes(2, 3)
    scores = scores.reshape(*scores.shape[:2], groups, num_tokens, -1)
    scores = jnp.where(mask[:, None, None], scores * c.head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    weights = weights.reshape(batch, c.num_kv_heads, groups * num_tokens, -1)
    mixed = jnp.einsum("bhqs,bhsd->bhqd", weights, values)
    mixed = mixed.reshape(batch, c.num_heads, num_tokens, c.head_dim)
    mixed = mixed.swapaxes(1, 2).reshape(batch, num_tokens, -1)
    return Linear(c.width, name="o")(mixed), (keys, values)


class MLP(nn.Module):
  """Gated SiLU feed-forward (arXiv:2002.05202)."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    gate = Linear(self.config.mlp_width, name="gate")(x)
    up = Linear(self.config.mlp_width, name="up")(x)
    return Linear(self.config.width, name="down")(jax.nn.silu(gate) * up)


class Layer(nn.Module):
  """One pre-norm decoder layer."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, layer, length, angles, mask):
    c = self.config
    y = RMSNorm(c.norm_epsilon, name="attention_norm")(x)
    y, layer = Attention(c, name="attention")(y, layer, length, angles, mask)
    x = x + y
    y = RMSNorm(c.norm_epsilon, name="mlp_norm")(x)
    return x + MLP(c, name="mlp")(y), layer


class Embedding(nn.Module):
  """[V, M], looked up by token and, where tied, multiplied for logits."""

  config: TransformerConfig

  def setup(self):
    self.weight = self.param(
      "weight",
      nn.initializers.normal(0.02),
      (self.config.vocab_size, self.config.width),
      jnp.dtype(self.config.dtype),
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.weight[tokens]

  def logits(self, x: jax.Array) -> jax.Array:
    return project(self.weight, x, jnp.float32)


class Transformer(nn.Module):
  """The whole decoder; `types.Model.apply` says what a call does."""

  config: TransformerConfig

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    cache: KVCache,
    *,
    parents: jax.Array | None = None,
    start: int = 0,
    stop: int | None = None,
    hidden: jax.Array | None = None,
    head: bool = True,
    features: tuple[int, ...] = (),
  ) -> tuple[ModelOutput, KVCache]:
    c = self.config
    stop = c.num_layers if stop is None else stop
    num_tokens = tokens.shape[1]
    where = positions(cache.length, parents, num_tokens)  # [B, T]
    frequency = rope_frequencies(c.rope_theta, c.head_dim, c.rope_scaling)
    angle = where[:, :, None, None].astype(jnp.float32)
    angle *= frequency[None, None, None]
    angles = jnp.cos(angle), jnp.sin(angle)
    windows = c.windows or (None,) * c.num_layers
    masks = {
      window: visible(
        cache.length, parents, num_tokens, cache.num_slots, window
      )
      for window in set(windows[start:stop])
    }

    embed = Embedding(c, name="embed")
    x = embed(tokens) if start == 0 else hidden
    layers, streams = list(cache.layers), {}
    for i in range(start, stop):
      streams[i] = x
      x, layers[i] = Layer(c, name=f"layer_{i}")(
        x, layers[i], cache.length, angles, masks[windows[i]]
      )
    streams[stop] = x
    normed = RMSNorm(c.norm_epsilon, name="final_norm")(x)
    logits = None
    if head and c.tied:
      logits = embed.logits(normed)
    elif head:
      logits = Embedding(c, name="head").logits(normed)
    output = ModelOutput(logits, normed, tuple(streams[i] for i in features))
    return output, cache.replace(layers=tuple(layers))


@functools.cache  # equal configs give one, so jit traces once
def model(config: TransformerConfig) -> Model:
  """The decoder of this shape as pure functions."""
  module = Transformer(config)

  def apply(params, tokens, cache, **options):
    return module.apply({"params": params}, tokens, cache, **options)

  def init_cache(batch: int, slots: int) -> KVCache:
    return kv.init(
      batch,
      slots,
      config.num_layers,
      config.num_kv_heads,
      config.head_dim,
      jnp.dtype(config.dtype),
    )

  return Model(apply, init_cache, config.vocab_size)


def init_params(config: TransformerConfig, key: jax.Array):
  """Random weights: N(0, 0.02^2), norms 1. A nested dict of arrays."""
  cache = model(config).init_cache(1, 2)
  tokens = jnp.zeros((1, 1), jnp.int32)
  return jax.jit(Transformer(config).init)(key, tokens, cache)["params"]
