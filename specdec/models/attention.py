"""Positions and attention masks of draft nodes over KV cache slots.

Slots below `length` are committed; slot length + j holds node j of the call.
Invariant: a sliding window is measured in positions (length + depth), not in
slots, so drafted nodes never push committed text out of it.
"""

import jax
import jax.numpy as jnp

from specdec import draft_tree


def positions(
  length: jax.Array, parents: jax.Array | None, num_nodes: int
) -> jax.Array:
  """Returns [B, N]: the absolute position of every node, length + depth.

  Arguments are those of `attention_mask`.
  """
  depth = draft_tree.depth(
    draft_tree.chain(num_nodes) if parents is None else parents
  )
  return length[:, None] + jnp.atleast_2d(depth)


def attention_mask(
  length: jax.Array,
  parents: jax.Array | None,
  num_nodes: int,
  num_slots: int,
  window: int | None = None,
) -> jax.Array:
  """Returns [B, N, S] bool: whether node n attends to slot s.

  Args:
    length: [B] committed positions.
    parents: None for a chain, [N] or [B, N] for a tree.
    window: positions in the sliding window, the node's included; None for full
      attention.
  """
  relative = jnp.arange(num_slots)[None] - length[:, None]  # [B, S]
  if parents is None:
    node = jnp.arange(num_nodes)[None, :, None]
    mask = relative[:, None, :] <= node
    if window is not None:
      mask &= relative[:, None, :] > node - window
    return mask
  ancestors = jnp.asarray(draft_tree.ancestors(parents))
  ancestors = jnp.broadcast_to(
    ancestors, (length.shape[0], num_nodes, num_nodes)
  )
  slot_node = jnp.clip(relative, 0, num_nodes - 1)  # [B, S]
  is_ancestor = jnp.take_along_axis(
    ancestors, slot_node[:, None, :], axis=2
  )  # [B, N, S]
  committed = (relative < 0)[:, None, :]
  mask = committed | (is_ancestor & (relative < num_nodes)[:, None, :])
  if window is not None:
    depth = jnp.broadcast_to(
      draft_tree.depth(parents), (length.shape[0], num_nodes)
    )
    slot_depth = jnp.where(
      relative < 0, relative, jnp.take_along_axis(depth, slot_node, axis=1)
    )  # [B, S] position of a slot relative to length
    mask &= slot_depth[:, None, :] > depth[:, :, None] - window
  return mask
