"""Block drafters: all draft tokens of a round in one pass over the target's KV.

DFlash (Chen et al., arXiv:2602.06036). Streams entering several of the target's
layers are projected to one context vector for each verified token; every layer
of the drafter makes keys and values of its own from them. A block, the pending
token (the anchor) and masks behind it, attends to this context and to itself;
slot by slot it gives distributions of the tokens to come. JetSpec's block is
causal, DSpark and Domino add what follows from the tokens drawn (successor.py).

The anchor's own hidden state is not known when it is the anchor: the context
are the committed tokens but the pending one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec import sharding
from specdec.drafters.heads import successor
from specdec.drafters.heads.draft_head import (
  Head,
  TargetWeights,
  cache_constructor,
  embedded,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.rotary import rotate
from specdec.models.transformer import (
  MLP,
  Linear,
  Place,
  RMSNorm,
  linear,
  rope_angles,
  split_heads,
)
from specdec.types import Array, KVCache, ModelOutput, PyTree
from specdec.utils.constructors import cached

# (query [B, T, heads, D], key, value [B, KV heads, T, D]) of a block
#   -> ([B, T, heads * D], whatever the layer leaves behind).
Attend = Callable[[Array, Array, Array], tuple[Array, PyTree]]


class BlockHead(NamedTuple):
  """A block drafter as pure functions of its weights.

  B rows, A blocks a row, S slots and K draft tokens a block, W its width, n
  tokens it can draft.

  init(key) -> weights
  init_cache(batch, slots) -> KVCache of the context
  encode(weights, output) -> [B, T, W], the context of a ModelOutput's tokens
  context(weights, encoded, positions [B, T]) -> (key, value) a layer,
    [B, KV heads, T, D]
  draft(weights, target_weights, anchors [B, A], positions [B, A, S], attends)
    -> (hidden [B, A, K, W], what each of `attends`, one a layer, left behind)
  logits(weights, target_weights, hidden [B, T, W]) -> [B, T, n]
  begin(weights, batch, num_tokens) -> the successor's state before the anchor
  step(weights, target_weights, state, tokens [B, T], hidden [B, T, W], logits
      [B, T, n], depth)
    -> (state, logits [B, T, n] given the tokens); as successor.Successor.step
  confidence(weights, hidden [B, T, W], tokens [B, T]) -> [B, T] logits of the
    probability that the draft token behind `tokens` is accepted
  """

  head_config: HeadConfig
  features: tuple[int, ...]  # DraftSpec.features
  ids: np.ndarray | None  # [n] tokens that it can draft; None: all
  vocab_size: int  # V
  init: Callable[[Array], PyTree]
  init_cache: Callable[[int, int], KVCache]
  encode: Callable[[PyTree, ModelOutput], Array]
  context: Callable[..., tuple[tuple[Array, Array], ...]]
  draft: Callable[..., tuple[Array, tuple]]
  logits: Callable[..., Array]
  begin: Callable[..., PyTree]
  step: Callable[..., tuple[PyTree, Array]]
  confidence: Callable[..., Array]

  def num_slots(self, k: int | None = None) -> int:
    """S for k draft tokens, by default as many as it is trained for.

    Only a causal block may be cut: any other's slots see all of it.
    """
    config = self.head_config
    k = k if k is not None and config.block.causal else config.levels
    return k + config.block.offset


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
    y, left = attend(query, *self._stored(key, value, angles))
    return self.o(self.place(y, "rows", None, "query")), left


class BlockLayer(nn.Module):
  """A decoder layer over slots; only its keys and values know the context."""

  config: TransformerConfig
  place: Place = sharding.anywhere

  def setup(self):
    c = self.config
    self.attention_norm = RMSNorm(c.norm_epsilon)
    self.attention = BlockAttention(c, self.place)
    self.mlp_norm = RMSNorm(c.norm_epsilon)
    self.mlp = MLP(c, self.place)

  def context(self, x: Array, angles) -> tuple[Array, Array]:
    return self.attention.context(x, angles)

  def __call__(self, x: Array, angles, attend: Attend):
    y, left = self.attention(self.attention_norm(x), angles, attend)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)), left


class Block(nn.Module):
  """`BlockHead`'s functions."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def setup(self):
    r, b = self.head_config, self.head_config.block
    self.config = r.layers
    self.gather = Linear(r.width)
    self.context_norm = RMSNorm(r.norm_epsilon)
    if b.mask_token < 0:
      self.mask = self.param("mask", nn.initializers.normal(0.02), (r.width,))
    if r.width != self.target.width:
      self.down = Linear(r.width)
    self.layer = [
      BlockLayer(self.config, self.place) for _ in range(r.num_layers)
    ]
    self.norm = RMSNorm(r.norm_epsilon)
    self.head = Head(r, self.target, self.num_tokens, normed=True)
    if b.successor != "none":
      kind = successor.KINDS[b.successor]
      self.successor = kind(r, self.target, self.num_tokens)
    if b.confidence:
      self.confidence_head = Linear(1, bias=True)

  def encode(self, output: ModelOutput) -> Array:
    return self.context_norm(
      self.gather(jnp.concatenate(output.features, axis=-1))
    )

  def context(self, encoded: Array, positions: Array):
    angles = rope_angles(self.config, positions, None)
    return tuple(layer.context(encoded, angles) for layer in self.layer)

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
    left = []
    for layer, attend in zip(self.layer, attends, strict=True):
      x, part = layer(x, angles, attend)
      left.append(part)
    x = self.norm(x).reshape(batch, blocks, slots, -1)
    return x[:, :, b.offset :], tuple(left)

  def _embed(self, target_weights: TargetWeights, tokens: Array) -> Array:
    x = embedded(target_weights, tokens)
    return x if x.shape[-1] == self.head_config.width else self.down(x)

  def logits(self, target_weights: TargetWeights, hidden: Array) -> Array:
    return self.head(target_weights, hidden)

  def begin(self, batch: int, num_tokens: int) -> PyTree:
    if self.head_config.block.successor == "none":
      return ()
    return self.successor.begin(batch, num_tokens)

  def step(self, target_weights, state, tokens, hidden, logits, depth):
    if self.head_config.block.successor == "none":
      return state, logits
    state, term = self.successor.step(
      target_weights, state, tokens, hidden, depth
    )
    return state, logits + term.astype(logits.dtype)

  def confidence(self, hidden: Array, tokens: Array) -> Array:
    if self.head_config.block.successor != "none":
      memory = self.successor.memory(tokens).astype(hidden.dtype)
      hidden = jnp.concatenate([hidden, memory], axis=-1)
    return self.confidence_head(hidden)[..., 0]


@cached
def block(
  head_config: HeadConfig,
  target: TransformerConfig,
  ids: np.ndarray | None = None,
  place: sharding.Placement | None = None,
) -> BlockHead:
  """Returns the functions of a block drafter.

  Args:
    ids: [n] tokens that it can draft; None: all.
    place: on a mesh; its weights lie whole on every chip.

  Raises:
    ValueError: the head config does not fit the target, or the ids the head
      config.
  """
  head_config.check(target)
  ids = None if ids is None else np.array(ids)
  head_config.check_ids(ids)
  num_tokens = head_config.vocabulary or target.vocab_size
  instance = Block(head_config, target, num_tokens, place or sharding.anywhere)

  def call(method):
    def run(weights, *args):
      return instance.apply({"params": weights}, *args, method=method)

    return run

  def once(mdl):
    """Every weight there is."""
    stream = jnp.zeros((1, 1, target.width))
    zero = jnp.zeros((1, 1), jnp.int32)
    target_weights = TargetWeights(
      jnp.zeros((max(1, head_config.block.mask_token + 1), target.width)),
      jnp.zeros((num_tokens, target.width)),
    )
    streams = (stream,) * len(head_config.features)
    mdl.context(mdl.encode(ModelOutput(None, stream, streams)), zero)

    def attend(query, key, value):
      return query.reshape(*query.shape[:2], -1), None

    slots = head_config.levels + head_config.block.offset
    positions = jnp.zeros((1, 1, slots), jnp.int32)
    attends = [attend] * head_config.num_layers
    hidden, _ = mdl.draft(target_weights, zero, positions, attends)
    hidden = hidden[:, 0, :1]
    logits = mdl.logits(target_weights, hidden)
    state = mdl.begin(1, 1)
    mdl.step(target_weights, state, zero, hidden, logits, 0)
    if head_config.block.confidence:
      mdl.confidence(hidden, zero)

  def init(key):
    return jax.jit(lambda key: instance.init(key, method=once))(key)["params"]

  methods = Block.encode, Block.context, Block.draft, Block.logits
  methods += Block.begin, Block.step, Block.confidence
  return BlockHead(
    head_config,
    head_config.features,
    ids,
    target.vocab_size,
    init,
    cache_constructor(head_config, place),
    *map(call, methods),
  )
