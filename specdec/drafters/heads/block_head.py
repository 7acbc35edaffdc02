"""A block drafter as pure functions: what draft_head.py is to other heads.

One BlockHead is run by block_serve.py when it drafts and by block_unroll.py
when it is trained: the same weights through the same functions, so the two
cannot disagree.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec import sharding
from specdec.drafters.heads.draft_head import (
  DraftHead,
  TargetWeights,
  cache_constructor,
  instantiate,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.models.transformer import Place
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
  offer(weights, logits [..., n]) -> arrays [..., any]
  step(weights, target_weights, state, tokens [B, T], hidden [B, T, W], offered
      [B, T, any], depth)
    -> (state, logits [B, T, n] given the tokens); as offer, of
    successor.Successor
  selection(weights, hidden [B, T, W], tokens [B, T], logits [B, T, n], offered,
      labels [B, T]) -> as successor.Selector.selection; of no other successor
  confidence(weights, hidden [B, T, W], tokens [B, T]) -> [B, T] logits of the
    probability that the draft token after `tokens` is accepted
  """

  head_config: HeadConfig
  place: Place  # of its activations and cache
  features: tuple[int, ...]  # DraftSpec.features
  ids: np.ndarray | None  # [n] tokens that it can draft; None: all
  target: TransformerConfig
  init: Callable[[Array], PyTree]
  init_cache: Callable[[int, int], KVCache]
  encode: Callable[[PyTree, ModelOutput], Array]
  context: Callable[..., tuple[tuple[Array, Array], ...]]
  draft: Callable[..., tuple[Array, tuple]]
  logits: Callable[..., Array]
  begin: Callable[..., PyTree]
  offer: Callable[..., PyTree]
  step: Callable[..., tuple[PyTree, Array]]
  selection: Callable[..., tuple[Array, Array]]
  confidence: Callable[..., Array]

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def causal(self) -> bool:
    """Whether slots see those before them alone, in every layer: then a block
    is cut where the draft ends."""
    config = self.head_config
    return all(config.block.attention(i)[1] for i in range(config.num_layers))

  def num_slots(self, k: int | None = None) -> int:
    """S for k draft tokens, by default as many as it is trained for."""
    config = self.head_config
    if k is None or not self.causal:
      return config.block_size
    return k + config.block.offset


AnyHead = DraftHead | BlockHead  # what drafters.LEARNED constructs


@cached
def block_from_module(
  module: type[nn.Module],
  head_config: HeadConfig,
  target: TransformerConfig,
  ids: np.ndarray | None = None,
  place: sharding.Placement | None = None,
) -> BlockHead:
  """Returns the block drafter of a Flax module like block.Block.

  Args:
    ids: [n] tokens that it can draft; None: all.
    place: on a mesh.

  Raises:
    ValueError: the head config does not fit the target, or the ids the head
      config.
  """
  instance, ids, call = instantiate(module, head_config, target, ids, place)
  num_tokens = instance.num_tokens

  def once(mdl):
    """Uses every weight once, so that all of them are initialised."""
    hidden = jnp.zeros((1, 1, target.width))
    zero = jnp.zeros((1, 1), jnp.int32)
    target_weights = TargetWeights(
      jnp.zeros((max(1, head_config.block.mask_token + 1), target.width)),
      jnp.zeros((num_tokens, target.width)),
    )
    features = (hidden,) * len(head_config.features)
    mdl.context(mdl.encode(ModelOutput(None, hidden, features)), zero)

    def attend(query, key, value):
      return query.reshape(*query.shape[:2], -1), None

    positions = jnp.zeros((1, 1, head_config.block_size), jnp.int32)
    attends = [attend] * head_config.num_layers
    hidden, _ = mdl.draft(target_weights, zero, positions, attends)
    hidden = hidden[:, 0, :1]
    logits = mdl.logits(target_weights, hidden)
    state = mdl.successor.begin(1, 1)
    offered = mdl.successor.offer(logits)
    mdl.successor.step(target_weights, state, zero, hidden, offered, 0)
    if head_config.block.confidence:
      mdl.confidence(hidden, zero)

  def init(key):
    return jax.jit(lambda key: instance.init(key, method=once))(key)["params"]

  def of_successor(name):
    return call(lambda mdl, *args: getattr(mdl.successor, name)(*args))

  return BlockHead(
    head_config,
    place or sharding.anywhere,
    head_config.features,
    ids,
    target,
    init,
    cache_constructor(head_config, target, place),
    *map(call, (module.encode, module.context, module.draft, module.logits)),
    *map(of_successor, ("begin", "offer", "step", "selection")),
    call(module.confidence),
  )
