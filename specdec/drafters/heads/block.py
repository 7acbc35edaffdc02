"""Block drafters: all draft tokens of a round in one pass over the target's KV.

DFlash (Chen et al., arXiv:2602.06036). Hidden states entering several of the
target's layers are projected to one context vector for each verified token;
every layer of the drafter makes keys and values of its own from them. A block,
the pending token (the anchor) and masks after it, attends to this context and
to itself; slot by slot it gives distributions of the tokens to come. JetSpec's
block is causal, DSpark and Domino add what follows from the tokens drawn
(successor.py). DFlash2 (github.com/z-lab/dflash) chooses among a slot's
likeliest tokens, and convolves the slots around attention and MLP. In the
compact layout the hidden states pass a norm each before they are projected, as
EAGLE-3's do.

The anchor's own hidden state is not known when it is the anchor: the context is
every committed token except the pending one.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import linen as nn

from specdec import sharding
from specdec.drafters.heads import successor
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.block_head import Attend
from specdec.drafters.heads.draft_head import Embed, Head, TargetWeights
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.linear import Linear, RMSNorm, linear
from specdec.models.rotary import rotate
from specdec.models.transformer import MLP, Place, rope_angles, split_heads
from specdec.types import Array, ModelOutput


class BlockAttention(nn.Module):
  """Projections of attention whose keys and values come from two sources."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  def setup(self):
    c = self.config
    self.q = Linear(c.num_heads * c.head_dim, c.qkv_bias)
    self.k = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
    self.v = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
    self.o = Linear(c.width)
    self.q_norm = RMSNorm(c.norm_epsilon)
    self.k_norm = RMSNorm(c.norm_epsilon)

  def _heads(self, y: Array, axis: str) -> Array:
    return split_heads(y, self.config.head_dim, self.place, axis)

  def _stored(self, key: Array, value: Array, angles) -> tuple[Array, Array]:
    key = rotate(self.k_norm(self._heads(key, "key")), *angles)
    value = self._heads(value, "key")
    return key.swapaxes(1, 2), value.swapaxes(1, 2)

  def context(self, x: Array, angles) -> tuple[Array, Array]:
    """Returns keys and values [B, KV heads, T, D] of context x [B, T, W]."""
    return self._stored(*linear(x, self.k, self.v), angles)

  def __call__(self, x: Array, angles, attend: Attend):
    query, key, value = linear(x, self.q, self.k, self.v)
    query = rotate(self.q_norm(self._heads(query, "query")), *angles)
    y, cached = attend(query, *self._stored(key, value, angles))
    return self.o(self.place(y, "rows", None, "query")), cached


class _Zeros(Linear):
  """A linear map without a bias whose weights begin as zeros.

  A variable, not a param: zeros need no key of initialisation.
  """

  @nn.compact
  def parameters(self, x):
    shape = self.features, x.shape[-1]
    zeros = self.variable("params", "weight", jnp.zeros, shape, x.dtype)
    return zeros.value, None


def _identity(key: Array, shape: tuple[int, ...], dtype) -> Array:
  """Kernels [2, taps, W] that change nothing."""
  return jnp.zeros(shape, dtype).at[:, 0].set(1)


class Convolution(nn.Module):
  """DFlash2's grouped causal convolutions, before a sublayer and after it.

  Channel c of slot s becomes the sum over taps t <= s of the channel in slot
  s - t times base[t, c] + dynamic[s, t, group of c]. The dynamic part of both
  convolutions is one linear map of slot s before the first. They begin as
  the identity, so that training begins as DFlash.
  """

  taps: int
  group: int

  @nn.compact
  def __call__(self, x: Array, slots: int) -> tuple[Array, Callable]:
    """Returns the input [B, A S, W] of the sublayer, and what maps its output.

    Args:
      x: [B, A S, W], blocks of S = `slots` slots.
    """
    width = x.shape[-1]
    base = self.param("base", _identity, (2, self.taps, width), x.dtype)
    groups = width // self.group
    dynamic = _Zeros(2 * self.taps * groups, name="dynamic")(x)
    dynamic = dynamic.reshape(x.shape[0], -1, slots, 2, self.taps, groups)

    def convolve(side: int, x: Array) -> Array:
      x = x.reshape(x.shape[0], -1, slots, width)
      total = jnp.zeros_like(x)
      for tap in range(min(self.taps, slots)):
        before = jnp.pad(x, ((0, 0), (0, 0), (tap, 0), (0, 0)))[:, :, :slots]
        kernel = jnp.repeat(dynamic[..., side, tap, :], self.group, axis=-1)
        total += before * (base[side, tap][None, None, None] + kernel)
      return total.reshape(x.shape[0], -1, width)

    return convolve(0, x), functools.partial(convolve, 1)


class BlockLayer(nn.Module):
  """A decoder layer over slots; only its keys and values know the context."""

  config: TransformerConfig
  block: BlockConfig
  place: Place = sharding.anywhere

  def setup(self):
    c = self.config
    self.attention_norm = RMSNorm(c.norm_epsilon)
    self.attention = BlockAttention(c, self.place)
    self.mlp_norm = RMSNorm(c.norm_epsilon)
    self.mlp = MLP(c, self.place)
    if self.block.taps:
      self.attention_conv = Convolution(self.block.taps, self.block.group)
      self.mlp_conv = Convolution(self.block.taps, self.block.group)

  def __call__(self, x: Array, angles, attend: Attend, slots: int):
    y, after = self.attention_norm(x), lambda y: y
    if self.block.taps:
      y, after = self.attention_conv(y, slots)
    y, cached = self.attention(y, angles, attend)
    x = x + after(y)
    y = self.mlp_norm(x)
    if self.block.taps:
      y, after = self.mlp_conv(y, slots)
    return x + after(self.mlp(y)), cached


class Block(nn.Module):
  """`BlockHead`'s functions, but for those of its successor."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r, b = self.head_config, self.head_config.block
    self.config = r.layers
    count = 0 if r.is_published else len(r.features)
    self.stream_norms = [RMSNorm(r.norm_epsilon) for _ in range(count)]
    self.gather = Linear(r.width)
    self.context_norm = RMSNorm(r.norm_epsilon)
    if b.mask_token < 0:
      self.mask = self.param("mask", nn.initializers.normal(0.02), (r.width,))
    if r.width != self.target.width:
      self.embed_norm = RMSNorm(r.norm_epsilon)
      self.down = Linear(r.width)
    self.embed_table = Embed(r, self.target)
    self.layer = [
      BlockLayer(self.config, b, self.place) for _ in range(r.num_layers)
    ]
    self.norm = RMSNorm(r.norm_epsilon)
    self.head = Head(r, self.target, self.num_tokens, normed=True)
    kind = successor.KINDS[b.successor]
    self.successor = kind(r, self.target, self.num_tokens, self.embed_table)
    if b.confidence:
      self.confidence_head = Linear(1, bias=True)

  def encode(self, output: ModelOutput) -> Array:
    states = output.features
    if self.stream_norms:
      pairs = zip(self.stream_norms, states, strict=True)
      states = [norm(x) for norm, x in pairs]
    return self.context_norm(self.gather(jnp.concatenate(states, axis=-1)))

  def context(self, encoded: Array, positions: Array):
    angles = rope_angles(self.config, positions, None)
    return tuple(
      layer.attention.context(encoded, angles) for layer in self.layer
    )

  def draft(
    self,
    target_weights: TargetWeights,
    anchors: Array,
    positions: Array,
    attends: Sequence[Attend],
  ) -> tuple[Array, tuple]:
    b, (batch, blocks, slots) = self.head_config.block, positions.shape
    first = self._embed(target_weights, anchors)[:, :, None]
    if b.mask_token < 0:
      mask = self.mask.astype(first.dtype)
    else:
      mask = self._embed(target_weights, jnp.full((1, 1), b.mask_token))[0, 0]
    size = batch, blocks, slots - 1, first.shape[-1]
    x = jnp.concatenate([first, jnp.broadcast_to(mask, size)], axis=2)
    x = x.reshape(batch, blocks * slots, -1)
    positions = positions.reshape(batch, -1)
    angles = rope_angles(self.config, positions, None)
    layers = []
    for layer, attend in zip(self.layer, attends, strict=True):
      x, cached = layer(x, angles, attend, slots)
      layers.append(cached)
    x = self.norm(x).reshape(batch, blocks, slots, -1)
    return x[:, :, b.offset :], tuple(layers)

  def _embed(self, target_weights: TargetWeights, tokens: Array) -> Array:
    x = self.embed_table(target_weights, tokens)
    if x.shape[-1] == self.head_config.width:
      return x
    return self.down(self.embed_norm(x))

  def logits(self, target_weights: TargetWeights, hidden: Array) -> Array:
    return self.head(target_weights, hidden)

  def confidence(self, hidden: Array, tokens: Array) -> Array:
    memory = self.successor.memory(tokens).astype(hidden.dtype)
    both = jnp.concatenate([hidden, memory], axis=-1)
    return self.confidence_head(both)[..., 0]
