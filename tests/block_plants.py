"""Mistakes of drafters of one pass, to plant in training or in decoding.

The name says which: `train_...` patches what training runs, `served_...`
returns what decodes.
"""

import dataclasses

import jax.numpy as jnp

from specdec.drafters.heads import block_unroll
from specdec.training import draft_losses
from specdec.types import KVCache


def _train_before(patch, last):
  """Context before position last(anchor) instead of before the anchor."""
  honest = block_unroll._packed

  def packed(head, layer, anchors, *rest):
    return honest(head, layer, last(anchors), *rest)

  patch.setattr(block_unroll, "_packed", packed)


def train_its_own_position(patch):
  """Context that includes the anchor, whose hidden state is of the future."""
  _train_before(patch, lambda anchors: anchors + 1)


def train_no_context(patch):
  """Blocks that see nothing but themselves."""
  _train_before(patch, lambda anchors: anchors - 2**20)


def train_a_token_too_far(patch):
  """Slots that are taught the target's distributions of the next slots."""
  honest = draft_losses.aim_of_hidden

  def aim(head, params, hidden, labels, *rest):
    hidden, labels = (jnp.roll(x, -1, axis=1) for x in (hidden, labels))
    return honest(head, params, hidden, labels, *rest)

  patch.setattr(draft_losses, "aim_of_hidden", aim)


def served_without_context(drafter):
  """A cache that stays empty."""

  def propose(params, state, context):
    empty = state.replace(length=0 * state.length)
    return drafter.propose(params, empty, context)[0], state

  return drafter._replace(propose=propose)


def served_left_in_the_cache(drafter):
  """Keys and values of what was drafted, instead of what was committed."""

  def update(params, state, *rest):
    after = drafter.update(params, state, *rest)
    if isinstance(after, KVCache):
      return after.replace(layers=state.layers)
    cache = after.cache.replace(layers=state.cache.layers)
    return after._replace(cache=cache)

  return drafter._replace(update=update)


def other_mask(head_config):
  """Causal inside the block where it was full, and full where causal."""
  block = head_config.block
  block = dataclasses.replace(block, causal=not block.causal)
  return dataclasses.replace(head_config, block=block)
