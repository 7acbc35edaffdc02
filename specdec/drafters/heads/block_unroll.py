"""Runs blocks at many anchors of a text at once, as decoding would run each.

The block of the anchor at position a sees the context of positions before a and
itself; the tokens after the anchor are the text's. Masks are of anchors by
positions (of slots by positions where a layer has a window) and of slots by
slots. Scores, the largest array, are [B, heads, A, S, T + S]: all slots by the
context, and never by the slots of other anchors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec.drafters.heads.block_head import Attend, BlockHead
from specdec.drafters.heads.draft_head import TargetWeights
from specdec.models.products import einsum_float32
from specdec.types import Array, ModelOutput, PyTree


class Unrolled(NamedTuple):
  """What blocks draft: entry k is of the token k + 1 after the anchor."""

  logits: Array  # [B, A, K, n] given the anchor and the text after it
  base: Array  # [B, A, K, n] without the successor's part
  confidence: Array | None  # [B, A, K] logits
  # Of a selector with labels: its cross-entropy, and whether they were
  # candidates, [B, A, K].
  selection: tuple[Array, Array] | None


def unroll(
  head: BlockHead,
  weights: PyTree,
  target_weights: TargetWeights,
  tokens: Array,
  context: tuple[tuple[Array, Array], ...],
  anchors: Array,
  labels: Array | None = None,
) -> Unrolled:
  """Runs the block of every anchor.

  Args:
    tokens: [B, T].
    context: `context_of` them.
    anchors: [B, A] positions, each with K tokens after it but for the last
      one, which is not read.
    labels: [B, A, K] what a selector should choose, of what it can draft.
  """
  config = head.head_config
  levels, slots = config.levels, head.num_slots()
  places = anchors[:, :, None] + jnp.arange(slots)[None, None]
  attends = [
    _packed(head, layer, anchors, slots, *config.block.attention(i))
    for i, layer in enumerate(context)
  ]
  anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
  hidden, _ = head.draft(
    weights, target_weights, anchor_tokens, places, attends
  )
  batch, blocks, _, width = hidden.shape
  base = head.logits(
    weights, target_weights, hidden.reshape(batch, blocks * levels, width)
  ).reshape(batch, blocks, levels, -1)
  state = head.begin(weights, batch, blocks)
  logits, confidence, selection = [], [], []
  for level in range(levels):
    before = jnp.take_along_axis(tokens, anchors + level, axis=1)
    slot, offered = hidden[:, :, level], head.offer(weights, base[:, :, level])
    state, given = head.step(
      weights, target_weights, state, before, slot, offered, level
    )
    logits.append(given)
    if config.block.successor == "selector" and labels is not None:
      own = base[:, :, level], offered, labels[:, :, level]
      selection.append(head.selection(weights, slot, before, *own))
    if config.block.confidence:
      confidence.append(head.confidence(weights, slot, before))
  return Unrolled(
    jnp.stack(logits, axis=2),
    base,
    jnp.stack(confidence, axis=2) if confidence else None,
    tuple(jnp.stack(x, axis=2) for x in zip(*selection)) or None,
  )


def context_of(
  head: BlockHead, weights: PyTree, output: ModelOutput
) -> tuple[tuple[Array, Array], ...]:
  """Returns each layer's keys and values of a text that begins at position 0.

  Args:
    output: of the target on it; features as in head.features.
  """
  encoded = head.encode(weights, output)
  positions = jnp.arange(encoded.shape[1])[None]
  return head.context(weights, encoded, positions)


def _packed(
  head: BlockHead,
  layer,
  anchors: Array,
  slots: int,
  window: int | None,
  causal: bool,
) -> Attend:
  """Attention of all blocks over the context before them and themselves."""
  config, (keys, values) = head.head_config, layer
  number = np.arange(slots)
  size, blocks = keys.shape[2], anchors.shape[1]
  anchor = anchors[:, :, None, None]
  position = jnp.arange(size)[None, None, None]
  before = position < anchor  # [B, A, 1, T]
  inside = np.ones((slots, slots), bool)
  if causal:
    inside = np.tri(slots, dtype=bool)
  if window:
    before &= anchor + number[None, None, :, None] - position < window
    inside &= number[:, None] - number[None] < window

  before, inside = before[:, None, None], inside[None, None, None, None]

  def attend(query, key, value):
    batch, heads = keys.shape[:2]

    def by_block(x):  # [B, heads, A * S, D]
      return x.reshape(batch, heads, blocks, slots, -1)

    query = query.reshape(batch, blocks, slots, heads, -1, config.head_dim)

    def scores(form, keys, mask):
      x = einsum_float32(form, query, keys)
      x = config.head_dim**-0.5 * x  # [B, heads, group, A, S, ...]
      return jnp.where(mask, x, -jnp.inf)

    def weighted(form, weights, values):
      return einsum_float32(form, weights.astype(values.dtype), values)

    # One softmax of both parts, not concatenated and divided after the
    # products: arrays as large as the scores cost main-memory traffic.
    both = (
      scores("baskgd,bktd->bkgast", keys, before),
      scores("baskgd,bkaud->bkgasu", by_block(key), inside),
    )
    tops = (jnp.max(x, axis=-1, keepdims=True) for x in both)
    top = jax.lax.stop_gradient(jnp.maximum(*tops))
    text, block = (jnp.exp(x - top) for x in both)
    total = jnp.sum(text, axis=-1) + jnp.sum(block, axis=-1)
    y = weighted("bkgast,bktd->baskgd", text, values)
    y += weighted("bkgasu,bkaud->baskgd", block, by_block(value))
    y /= total.transpose(0, 3, 4, 1, 2)[..., None]
    y = y.astype(values.dtype)
    return y.reshape(batch, blocks * slots, -1), None

  return attend
