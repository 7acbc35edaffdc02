"""Which cache slots a node may see, by ancestry and position.

Slots below `length` are committed; slot length + j holds node j of the call.
Invariant: a sliding window is measured in positions (length + depth), never in
slots, so that a burst of drafted nodes cannot push committed text out of it.
"""

import jax
import jax.numpy as jnp

from specdec import draft_tree


def positions(
  length: jax.Array, parents: jax.Array | None, num_nodes: int
) -> jax.Array:
  """[B, N] absolute position of every node: length + depth."""
  depth = draft_tree.depth(
    draft_tree.chain(num_nodes) if parents is None else parents
  )
  return length[:, None] + jnp.atleast_2d(depth)


def visible(
  length: jax.Array,
  parents: jax.Array | None,
  num_nodes: int,
  num_slots: int,
  window: int | None = None,
) -> jax.Array:
  """[B, N, S] bool: node n may look at slot s.

  Args:
    length: [B] committed positions.
    parents: None for a chain, [N] or [B, N] for a tree.
    window: None, or how many positions a node sees, its own included.
  """
  relative = jnp.arange(num_slots)[None] - length[:, None]  # [B, S]
  if parents is None:
    node = jnp.arange(num_nodes)[None, :, None]
    mask = relative[:, None, :] <= node
    if window is not None:
      mask &= relative[:, None, :] > node - window
    return mask
  seen = jnp.asarray(draft_tree.ancestors(parents))
  seen = jnp.broadcast_to(seen, (length.shape[0], num_nodes, num_nodes))
  slot = jnp.clip(relative, 0, num_nodes - 1)  # [B, S] node of a slot
  own = jnp.take_along_axis(seen, slot[:, None, :], axis=2)  # [B, N, S]
  committed = (relative < 0)[:, None, :]
  mask = committed | (own & (relative < num_nodes)[:, None, :])
  if window is not None:
    depth = jnp.broadcast_to(
      draft_tree.depth(parents), (length.shape[0], num_nodes)
    )
    height = jnp.where(
      relative < 0, relative, jnp.take_along_axis(depth, slot, axis=1)
    )  # [B, S] position of a slot, counted from length
    mask &= height[:, None, :] > depth[:, :, None] - window
  return mask
