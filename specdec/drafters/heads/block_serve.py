"""Serving a block drafter: a BlockHead behind the three functions of a Drafter.

Invariant: after `init` and every `update` the cache holds the context of every
committed token but the pending one, and its length is their number. A block's
own keys and values fill scratch slots past `length` and are overwritten by the
next update, so rounds that were not drafted leave nothing to catch up with.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import draft_shape, sharding
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_head import Attend, BlockHead
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.models import attention
from specdec.models.attention import View
from specdec.types import (
  Array,
  Context,
  Draft,
  Drafter,
  KVCache,
  Model,
  ModelOutput,
  Params,
  PyTree,
)
from specdec.utils.constructors import cached

_WRITE = sharding.CACHE, sharding.CACHE, ("rows",)  # axes of kv.write's


class _Block(NamedTuple):
  """A block after its pass, from which the successor draws tokens.

  D slots, a level of the draft each.
  """

  head: BlockHead
  weights: tuple[PyTree, TargetWeights]
  place: sharding.Placement  # of distributions
  hidden: Array  # [B, D, W]
  offered: PyTree  # [B, D, any], as BlockHead.offer

  def begin(self) -> PyTree:
    """Returns the successor's state before the anchor."""
    return self.head.begin(self.weights[0], len(self.hidden), 1)

  def step(self, state: PyTree, tokens: Array, level: int | Array):
    """Returns the state after tokens [B, T], and a level's logits [B, T, V]."""
    at_level = jax.tree.map(
      lambda x: jnp.broadcast_to(
        jax.lax.dynamic_slice_in_dim(x, level, 1, axis=1),
        (*tokens.shape, x.shape[-1]),
      ),
      (self.hidden, self.offered),
    )
    head = self.head
    state, logits = head.step(*self.weights, state, tokens, *at_level, level)
    # A selector's are a few scores, no product to divide.
    if head.head_config.block.successor != "selector":
      logits = draft_heads.in_parts(logits, self.place)
    return state, draft_heads.spread(head, logits, self.place)

  def confidence(self, token: Array, level: int | Array) -> Array:
    """Returns [B], how likely what follows token [B, 1] is accepted."""
    slot = jax.lax.dynamic_slice_in_dim(self.hidden, level, 1, axis=1)
    logit = self.head.confidence(self.weights[0], slot, token)[:, 0]
    return jax.nn.sigmoid(logit.astype(jnp.float32))


@cached
def drafter(
  head: BlockHead,
  target: Model,
  shape: draft_shape.DraftShape,
  place: sharding.Placement | None = None,
  max_external_drafts: int = 0,
) -> Drafter:
  """Drafts a chain or a tree from one pass of the block.

  Weights: params.draft as `draft_head.weights_of` returns it. Its state is the
  KVCache of the context.

  Args:
    target: the very model that verifies.
    shape: what a draft looks like.
    place: the target's, on a mesh: distributions are split as its own are.
    max_external_drafts: of DraftSpec; for `drafters.fallback`.

  Raises:
    ValueError: the shape is deeper than the block.
  """
  del target  # its output is all that is read of it
  depth = shape.spec.max_depth
  head.head_config.check_levels(depth)
  place = place or sharding.anywhere

  def init(params: Params, context: Context, output: ModelOutput):
    batch, size = output.features[0].shape[:2]
    scratch = max(head.num_slots(depth), max(depth, max_external_drafts) + 1)
    slots = kv.num_slots(context.tokens.shape[1] + scratch)
    cache, chunk = head.init_cache(batch, slots), min(kv.CHUNK, size)

    def fill(i, layers):
      # The last piece may begin before the one ahead of it has ended.
      start = jnp.minimum(i * chunk, size - chunk)
      piece = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=1), output
      )
      first = jnp.full((batch,), start, jnp.int32)
      return _write_context(head, params.draft["net"], layers, piece, first)

    layers = jax.lax.fori_loop(0, -(-size // chunk), fill, cache.layers)
    return KVCache(layers, context.length - 1)

  def propose(params: Params, cache: KVCache, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), cache
    block, cache = _run_block(head, params, place, cache, context, depth)
    sample = _sample_chain if shape.loops else _sample_tree
    return sample(block, shape, context), cache

  def update(params, cache: KVCache, context, draft, accept_result, output):
    path = accept_result.path[:, :, None]
    features = tuple(
      jnp.take_along_axis(x, path, axis=1) for x in output.features
    )
    accepted = output._replace(logits=None, features=features)
    net = params.draft["net"]
    layers = _write_context(head, net, cache.layers, accepted, cache.length)
    return KVCache(layers, cache.length + accept_result.num_committed)

  spec = shape.spec._replace(
    features=head.features,
    max_external_drafts=max_external_drafts,
    name=head.head_config.kind,
  )
  return Drafter(spec, init, propose, update, idle=draft_shape.idle(shape))


def _write_context(
  head: BlockHead, net: PyTree, layers, output: ModelOutput, first: Array
):
  """Returns layers of a cache with the context of an output [B, T] in slots
  first [B], first + 1, ..."""
  encoded = head.encode(net, output)
  positions = first[:, None] + jnp.arange(encoded.shape[1])[None]
  put = head.place.on_each(kv.write, _WRITE, sharding.CACHE)
  return jax.tree.map(
    lambda buffer, new: put(buffer, new, first),
    layers,
    head.context(net, encoded, positions),
  )


def _run_block(
  head: BlockHead,
  params: Params,
  place: sharding.Placement,
  cache: KVCache,
  context: Context,
  depth: int,
) -> tuple[_Block, KVCache]:
  """Runs the one pass of a round, for as many slots as it drafts levels."""
  weights = params.draft["net"], draft_heads.target_weights_of(params)
  num_slots = head.num_slots(depth)
  views = [
    block_view(head, cache.length, num_slots, i)
    for i in range(len(cache.layers))
  ]
  attends = [
    _cached(head, layer, view)
    for layer, view in zip(cache.layers, views, strict=True)
  ]
  hidden, layers = head.draft(
    *weights, context.pending, views[0].positions[:, None], attends
  )
  hidden, logits = draft_heads.projected(
    head, weights, hidden[:, 0, :depth], place
  )
  offered = head.offer(weights[0], logits)
  block = _Block(head, weights, place, hidden, offered)
  return block, cache.replace(layers=layers)


def _sample_chain(
  block: _Block, shape: draft_shape.DraftShape, context: Context
) -> Draft:
  """Draws a chain, as long as the shape's policy and the block's own
  confidence, if the policy asks for it, decide."""
  policy = shape.policy
  confident = block.head.head_config.block.confidence and (
    policy is not None and policy.classes
  )

  def extend(carry, token, node):
    state, confidence = carry
    state, logits = block.step(state, token, node)
    if confident:
      confidence = block.confidence(token, node)
    return (state, confidence), logits[:, 0]

  draft, _ = draft_shape.sample_chain(
    context,
    shape.spec.max_depth,
    extend,
    (block.begin(), jnp.zeros(len(block.hidden), jnp.float32)),
    policy=policy,
    confidence=(lambda carry: carry[1]) if confident else None,
  )
  return draft


class _Carry(NamedTuple):
  """What drafting threads from level to level of a tree."""

  level: int  # of the next call
  state: PyTree  # the successor's, [B, nodes run so far, size]


def _sample_tree(
  block: _Block, shape: draft_shape.DraftShape, context: Context
) -> Draft:
  """Draws a tree; each node goes on from the state of its parent."""
  has_successor = block.head.head_config.block.successor != "none"

  def run(carry, tokens, parents, first, need_logits):
    if not need_logits:
      return carry, None
    if not has_successor:  # the slot's logits, for every path
      _, logits = block.step((), tokens[:, :1], carry.level)
      return carry._replace(level=carry.level + 1), logits
    above = jnp.asarray(parents)[..., first:]
    above = jnp.broadcast_to(above, tokens.shape)[:, :, None]

    # Leaves, which were not run, have no state.
    before = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0), (0, first - x.shape[1]), (0, 0))),
      carry.state,
    )
    state = jax.tree.map(
      lambda x: jnp.take_along_axis(x, above, axis=1), before
    )
    state, logits = block.step(state, tokens, carry.level)
    state = jax.tree.map(
      lambda old, new: jnp.concatenate([old, new], axis=1), before, state
    )
    return _Carry(carry.level + 1, state), logits

  state, logits = block.step(block.begin(), context.pending, 0)
  tree, _ = shape.sample_tree(context, logits[:, 0], run, _Carry(1, state))
  return tree.draft


def block_view(
  head: BlockHead, length: Array, num_slots: int, layer: int
) -> View:
  """Returns what a block's slots see in a layer: context and each other."""
  window, causal = head.head_config.block.attention(layer)
  all_slots = np.ones((1, num_slots, num_slots), bool)
  view = attention.view(length, None, 0, num_slots, window)
  return view._replace(ancestors=None if causal else all_slots)


def _cached(head: BlockHead, layer, view: View) -> Attend:
  """Attention over a layer's context and the block, written after it."""
  put = head.place.on_each(kv.write, _WRITE, sharding.CACHE)

  def attend(query, key, value):
    keys = put(layer[0], key, view.slot)
    values = put(layer[1], value, view.slot)
    y = attention.attend(
      query,
      keys,
      values,
      view,
      scale=head.head_config.head_dim**-0.5,
      on_mesh=head.place is not sharding.anywhere,
    )
    return y, (keys, values)

  return attend
