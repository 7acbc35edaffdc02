"""Flax decoder for the families of docs/checkpoints.md, Llama's and T5's.

Weights are [out, in] as in checkpoints, or packed by models/layouts.py. Norms,
rotary angles, softmax and logits are float32 in either dtype. `place`
constrains the sharding of activations (sharding.py): heads, inner MLP columns
and vocabulary are split over `model`; the residual stream is replicated.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec import cache as kv
from specdec import sharding
from specdec.models import recurrence
from specdec.models.attention import (
  View,
  attend,
  softcap,
  source_view,
  view,
  write_kv,
)
from specdec.models.config import TransformerConfig
from specdec.models.experts import (
  ACTIVATIONS,
  Experts,
  gated,
  normal,
  weight,
)
from specdec.models.latent import LatentAttention
from specdec.models.layouts import look_up, project, unpack
from specdec.models.linear import Linear, RMSNorm, linear, unit_rms
from specdec.models.recurrent_layer import Recurrent, make_room
from specdec.models.rotary import rope_angles, rotate
from specdec.types import (
  CrossKV,
  KVCache,
  Model,
  ModelOutput,
  Skip,
  Source,
  Sparse,
)
from specdec.utils.constructors import cached

Place = Callable[..., jax.Array]  # (x, *names of its axes) -> x


def distance_buckets(
  buckets: int, reach: int, bidirectional: bool
) -> np.ndarray:
  """Returns T5's bucket of each distance -reach .. reach: [2 reach + 1] ints.

  Half of the buckets hold one distance each, the others grow with its logarithm
  up to `reach` (arXiv:1910.10683, section 2.1). A distance is how far the key
  lies before the query; without `bidirectional` keys after it share bucket 0,
  with it they have half of the buckets.
  """
  distance = np.arange(-reach, reach + 1)
  offset = 0
  if bidirectional:
    buckets //= 2
    offset = np.where(distance < 0, buckets, 0)
    distance = np.abs(distance)
  distance = np.maximum(distance, 0)
  exact = buckets // 2
  # In float32, as checkpoints were trained.
  grown = np.log(np.maximum(distance, 1).astype(np.float32) / exact)
  grown = grown / np.float32(np.log(reach / exact)) * (buckets - exact)
  grown = np.minimum(exact + grown.astype(np.int32), buckets - 1)
  return offset + np.where(distance < exact, distance, grown)


class RelativeBias(nn.Module):
  """Learned bias of attention by relative position (arXiv:1910.10683).

  A call returns View.bias [2 R + 1, heads], R = relative_distance.
  """

  config: TransformerConfig
  bidirectional: bool = False

  @nn.compact
  def __call__(self) -> jax.Array:
    c = self.config
    shape = c.relative_buckets, c.num_heads
    # Not param, which would reject the shape of a packed table.
    table = self.variable(
      "params",
      "table",
      lambda: normal(self.make_rng("params"), shape, jnp.dtype(c.dtype)),
    ).value
    index = distance_buckets(
      c.relative_buckets, c.relative_distance, self.bidirectional
    )
    return unpack(table).astype(jnp.float32)[index]


def split_heads(y: jax.Array, head_dim: int, place: Place, axis: str):
  """Returns y [B, T, heads * head_dim] as [B, T, heads, head_dim]."""
  y = y.reshape(*y.shape[:2], -1, head_dim)
  return place(y, "rows", None, axis, None)


class Attention(nn.Module):
  """Grouped-query attention over cache slots, after writing this call's KV.

  Call arguments: x [B, T, M]; layer, (keys, values) of the cache or None;
  angles from `rope_angles`, or None; view, what the tokens attend to.
  """

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x, layer, angles, view: View):
    c = self.config

    def layer_of(name, count):
      return Linear(count * c.head_dim, c.qkv_bias, name=name)

    def heads(y, axis):
      return split_heads(y, c.head_dim, self.place, axis)

    gate = (Linear(c.num_heads * c.head_dim, name="gate"),)
    query, key, value, *gate = linear(
      x,
      layer_of("q", c.num_heads),
      layer_of("k", c.num_kv_heads),
      layer_of("v", c.num_kv_heads),
      *(gate if c.attention_gate else ()),
    )

    def normed(query, key):
      norm = functools.partial(RMSNorm, c.norm_epsilon, c.norm_offset)
      return norm(name="q_norm")(query), norm(name="k_norm")(key)

    if c.joint_qk_norm:
      query, key = normed(query, key)
    query, key = heads(query, "query"), heads(key, "key")
    if c.qk_norm and not c.joint_qk_norm:
      query, key = normed(query, key)
    if angles is not None:
      query, key = (
        rotate(x, *angles, c.rope_interleaved) for x in (query, key)
      )
      if c.unit_qk_norm:
        query, key = (
          unit_rms(x, c.norm_epsilon).astype(x.dtype) for x in (query, key)
        )
    elif c.unrotated_growth:
      reach = (view.positions[:, :, None, None] + 1) // c.unrotated_floor
      growth = 1 + c.unrotated_growth * jnp.log1p(reach.astype(jnp.float32))
      query = (query * growth).astype(query.dtype)
    value = heads(value, "key")
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    keys, values, view = write_kv(layer, keys, values, view, self.place)

    sink_logits = None
    if c.attention_sinks:
      zeros, shape = nn.initializers.zeros, (c.num_heads,)
      sink_logits = self.param("sink_logits", zeros, shape, x.dtype)
    y = attend(
      query,
      keys,
      values,
      view,
      scale=(c.query_scalar or c.head_dim) ** -0.5,
      cap=c.attention_softcap,
      sink_logits=sink_logits,
      on_mesh=self.place is not sharding.anywhere,
    )
    for of_heads in gate:
      y *= jax.nn.sigmoid(of_heads)
    y = self.place(y, "rows", None, "query")
    return Linear(c.width, c.o_bias, name="o")(y), (keys, values)


class CrossHeads(nn.Module):
  """Keys and values of a source for one decoder layer's cross-attention."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    c = self.config
    width = c.num_kv_heads * c.head_dim
    heads = (
      split_heads(y, c.head_dim, self.place, "key").swapaxes(1, 2)
      for y in linear(x, Linear(width, name="k"), Linear(width, name="v"))
    )
    return tuple(self.place(y, *sharding.CACHE) for y in heads)


class CrossAttention(nn.Module):
  """Attention over a source's keys and values, (k, v) [B, heads, P, dim]."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x, layer, view: View):
    c = self.config
    query = Linear(c.num_heads * c.head_dim, name="q")(x)
    y = attend(
      split_heads(query, c.head_dim, self.place, "query"),
      *layer,
      view,
      scale=(c.query_scalar or c.head_dim) ** -0.5,
      on_mesh=self.place is not sharding.anywhere,
    )
    y = self.place(y, "rows", None, "query")
    return Linear(c.width, name="o")(y)


class MLP(nn.Module):
  """Feed-forward layer, gated (arXiv:2002.05202) or not."""

  config: TransformerConfig
  place: Place = sharding.anywhere
  inner: int | None = None  # width; None: mlp_width

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config
    names = ("gate", "up") if c.gated else ("up",)
    width = self.inner or c.mlp_width
    first, *rest = linear(x, *(Linear(width, name=n) for n in names))
    inner = gated(c, first, *rest) if rest else ACTIVATIONS[c.activation](first)
    inner = self.place(inner, "rows", None, "mlp")
    return Linear(c.width, name="down")(inner)


class Layer(nn.Module):
  """Decoder layer; the residual stream bypasses disabled sublayers.

  Norms lie in front of sublayers, after them, or both.
  """

  config: TransformerConfig
  place: Place = sharding.anywhere
  has_attention: bool = True
  has_mlp: bool = True
  recurrent: bool = False  # a state in the place of attention
  dense: bool = False  # an MLP in the place of a mixture's experts

  @nn.compact
  def __call__(self, x, layer, angles, view: View, source=None):
    """`source`: None, or (keys, values) and the view of cross-attention."""
    c = self.config
    norm = functools.partial(RMSNorm, c.norm_epsilon, c.norm_offset)
    # Without a cache, or with one that grows (drafters/heads/unroll.py).
    in_training = layer is None or view.mask is not None
    if self.has_attention:
      y = norm(name="attention_norm")(x) if c.pre_norms else x
      if self.recurrent:
        y, layer = Recurrent(c, self.place, name="recurrent")(y, layer, view)
      else:
        kind = LatentAttention if c.latent else Attention
        attention = kind(c, self.place, name="attention")
        y, layer = attention(y, layer, angles, view)
      y = self.place(y, "rows", None, None)  # sums over the devices of heads
      x = x + (norm(name="attention_post_norm")(y) if c.post_norms else y)
    if self.has_attention and source is not None:
      y = norm(name="cross_norm")(x)
      y = CrossAttention(c, self.place, name="cross")(y, *source)
      x = x + self.place(y, "rows", None, None)
    if self.has_mlp:
      y = norm(name="mlp_norm")(x) if c.pre_norms else x
      if self.dense:
        y = MLP(c, self.place, c.dense_width, name="mlp")(y)
      elif c.num_experts:
        experts = Experts(c, self.place, name="mlp")
        y = experts(y, in_training) + self.shared(y)
      else:
        y = MLP(c, self.place, name="mlp")(y)
      y = self.place(y, "rows", None, None)
      x = x + (norm(name="mlp_post_norm")(y) if c.post_norms else y)
    return x, layer

  def shared(self, x: jax.Array) -> jax.Array | float:
    """Returns what an MLP that every token passes adds to its experts."""
    c = self.config
    if not c.shared_width:
      return 0.0
    y = MLP(c, self.place, c.shared_width, name="shared")(x)
    if c.shared_gate:
      y *= jax.nn.sigmoid(Linear(1, name="shared_gate")(x))
    return y


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


class Encoder(nn.Module):
  """Encoder of T5: a source's keys and values for every decoder layer.

  It holds the projections of cross-attention to keys and values, because they
  are read once a source; and it embeds as the decoder does.
  """

  config: TransformerConfig
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, source: Source) -> CrossKV:
    c = self.config
    num_tokens = source.tokens.shape[1]
    length = source.length
    everything = view(jnp.zeros(1, jnp.int32), None, 0, num_tokens)
    everything = everything._replace(
      mask=source_view(length, num_tokens).mask_of(jnp.arange(num_tokens)),
      bias=RelativeBias(c, bidirectional=True, name="relative_bias")(),
    )
    x = Embedding(c, name="embed")(source.tokens)
    x = self.place(x, "rows", None, None)
    if c.scale_embedding:
      x *= jnp.asarray(c.width**0.5, x.dtype)
    for i in range(c.encoder_layers):
      layer = Layer(c, self.place, name=f"layer_{i}")
      x, _ = layer(x, None, None, everything)
    x = RMSNorm(c.norm_epsilon, c.norm_offset, name="final_norm")(x)
    layers = [
      CrossHeads(c, self.place, name=f"cross_{i}")(x)
      for i in range(c.num_layers)
    ]
    return CrossKV(tuple(layers), length)


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
    sparse: Sparse | None = None,
    cross: CrossKV | None = None,
    seen: View | None = None,
  ) -> tuple[ModelOutput, KVCache]:
    """`cross`: in training, where there is no cache to hold it; `seen` what the
    tokens attend to, in the place of `parents`: in training as well."""
    c = self.config
    stop = c.num_layers if stop is None else stop
    num_tokens = tokens.shape[1]
    if cache is None:  # training: the tokens attend to each other only
      length = jnp.zeros(tokens.shape[:1], jnp.int32)
      layers = [None] * c.num_layers
    else:
      length, layers, cross = cache.length, list(cache.layers), cache.cross
    if bool(c.encoder_layers) != (cross is not None):
      raise ValueError(
        "an encoder-decoder needs a source and the cache that `encode` made of "
        "it; a decoder alone has neither"
      )
    windows = c.windows or (None,) * c.num_layers
    if seen is None:
      seen = view(length, parents, first, num_tokens)
    if cache is not None and c.recurrence:
      recurrent = [i for i in c.recurrence.layers if start <= i < stop]
      old = [layers[i] for i in recurrent]
      new = make_room(self.place, old, seen, c.recurrence)
      for i, layer in zip(recurrent, new, strict=True):
        layers[i] = layer
    bound = "chunk" if c.chunked else "window"
    views = {w: seen._replace(**{bound: w}) for w in set(windows[start:stop])}
    if c.relative_buckets:
      bias = RelativeBias(c, name="relative_bias")()
      views = {w: v._replace(bias=bias) for w, v in views.items()}
      angles = dict.fromkeys(views)
    else:
      angles = {w: rope_angles(c, v.positions, w) for w, v in views.items()}
    source = [None] * c.num_layers
    if cross is not None:
      seen = source_view(cross.length, num_tokens)
      if cache is None:
        seen = seen.masked(cross.layers[0][0].shape[2])
      source = [(layer, seen) for layer in cross.layers]

    if sparse is not None:
      views = {w: v.sparse(sparse) for w, v in views.items()}
    embed = Embedding(c, name="embed")
    x = embed(tokens) if start == 0 else hidden
    x = self.place(x, "rows", None, None)
    if start == 0 and c.scale_embedding:
      x *= jnp.asarray(c.width**0.5, x.dtype)  # rounded to dtype, as trained
    residuals = {}  # layer -> residual stream entering it
    for i in range(start, stop):
      residuals[i] = x
      runs = (True, True) if skip is None else tuple(i not in s for s in skip)
      turned = None if i in c.unrotated_layers else angles[windows[i]]
      runs = (*runs, c.is_recurrent(i), i in c.dense_layers)
      x, layers[i] = Layer(c, self.place, *runs, name=f"layer_{i}")(
        x, layers[i], turned, views[windows[i]], source[i]
      )
    residuals[stop] = x
    normed = RMSNorm(c.norm_epsilon, c.norm_offset, name="final_norm")(x)
    logits = None
    if head:
      table = embed if c.tied else Embedding(c, name="head")
      x = normed * c.width**-0.5 if c.scale_logits else normed
      logits = softcap(table.logits(x), c.logit_softcap)
      logits = self.place(logits, "rows", None, "vocab")
    output = ModelOutput(logits, normed, tuple(residuals[i] for i in features))
    if cache is not None:
      cache = cache.replace(layers=tuple(layers))
    return output, cache


@cached
def model(config: TransformerConfig, place: Place | None = None) -> Model:
  """Builds a model; `place` is a sharding.Placement, None for one device."""
  place = place or sharding.anywhere
  module = Transformer(config, place)

  def apply(params, tokens, cache, **options):
    return module.apply({"params": params}, tokens, cache, **options)

  def init_cache(batch: int, slots: int) -> KVCache:
    dtype = jnp.dtype(config.dtype)
    cache = kv.init(
      batch,
      slots,
      config.num_attention_layers,
      config.num_kv_heads,
      config.kv_dims,
      jnp.dtype(config.kv or dtype),
    )
    with_attention = iter(
      jax.tree.map(lambda x: place(x, *sharding.CACHE), cache.layers)
    )

    def recurrent():
      layer = recurrence.init(config.recurrence, batch, dtype)
      return sharding.tree_map(
        lambda names, x: place(x, *names), sharding.RECURRENT, layer
      )

    layers = (
      recurrent() if config.is_recurrent(i) else next(with_attention)
      for i in range(config.num_layers)
    )
    return cache.replace(layers=tuple(layers))

  encoder = Encoder(config, place)

  def encode(params, source: Source) -> CrossKV:
    read = params["encoder"] | {"embed": params["embed"]}
    return encoder.apply({"params": read}, source)

  return Model(
    apply,
    init_cache,
    config.vocab_size,
    config.num_layers,
    encode if config.encoder_layers else None,
    config.recurrence and config.recurrence.num_nodes,
  )


def init_params(config: TransformerConfig, key: jax.Array):
  """Draws random weights N(0, 0.02^2), with norms set to one.

  Outside jit the tensors are drawn one at a time, since the random bits of all
  of them together take several times their memory.
  """
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  if not config.encoder_layers:
    return Transformer(config).lazy_init(key, tokens, None)["params"]
  length = jax.ShapeDtypeStruct((1,), jnp.int32)
  encoder_key, key = jax.random.split(key)
  source = Source(tokens, length)
  encoder = Encoder(config).lazy_init(encoder_key, source)["params"]
  del encoder["embed"]  # the decoder's
  size = (1, config.num_kv_heads, 1, config.head_dim)
  cross = jax.ShapeDtypeStruct(size, config.dtype)
  cross = CrossKV(((cross, cross),) * config.num_layers, length)
  init = functools.partial(Transformer(config).lazy_init, key, tokens, None)
  return init(cross=cross)["params"] | {"encoder": encoder}
