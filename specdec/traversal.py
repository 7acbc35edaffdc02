"""Traversals of a draft whose nodes are accepted with given probabilities.

Each has two sides that must agree: the path itself, given which nodes' uniform
draws succeeded, and the probability that it comes so deep. Both see a draft's
structure only. Arrays are [B, N]; nodes not in use are never accepted.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from specdec import draft_tree
from specdec.types import AcceptanceRule, Array, Draft


class Traversal(NamedTuple):
  """A path's two sides.

  traverse(draft, kept [B, N] bool, depth) -> path [B, depth + 1], how many
    nodes of it besides the root, and the last of them [B].
  prefix_acceptance(draft, accept_prob [B, N], depth) -> [B, depth]: the
    probability that d + 1 nodes or more are accepted.
  In both, draft.parents are in place (DraftSpec.with_tree).
  """

  traverse: Callable[[Draft, Array, int], tuple[Array, Array, Array]] | None
  prefix_acceptance: Callable[[Draft, Array, int], Array]


def drafted(draft: Draft) -> Array:
  """[B, N] bool: the nodes in use."""
  return jnp.arange(draft.tokens.shape[1])[None] < draft.count[:, None]


def parents_of(draft: Draft) -> Array:
  """[B, N] parents, where all rows have one tree, too."""
  return jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)


def accept_probs(
  rule: AcceptanceRule, draft: Draft, target_log_probs: Array
) -> Array:
  """[B, N] the rule's accept_prob of every row; target_log_probs [B, N, V]."""
  return _of_rows(rule.accept_prob, draft, target_log_probs)


def residuals(
  rule: AcceptanceRule, draft: Draft, target_log_probs: Array, node: Array
) -> Array:
  """[B, V] the rule's residual of every row after its node, node [B]."""
  return _of_rows(rule.residual, draft, target_log_probs, node)


def _of_rows(function, draft: Draft, target_log_probs: Array, *node: Array):
  """One of a rule's functions of every row, which sees one draft, unbatched."""
  batch, nodes, vocab_size = target_log_probs.shape
  chex.assert_shape(draft.tokens, (batch, nodes))
  chex.assert_shape(draft.parents, (..., nodes))
  chex.assert_shape([draft.count, *node], (batch,))
  chex.assert_type([draft.tokens, target_log_probs], [int, float])
  if draft.log_probs is not None:
    chex.assert_shape(draft.log_probs, (batch, nodes, vocab_size))
  # A tree that rows share stays the NumPy array it is.
  axes = Draft(0, None if draft.parents.ndim == 1 else 0, 0, 0)
  return jax.vmap(function, in_axes=(axes, 0, *(0 for _ in node)))(
    draft._replace(resume=None, certainty=None), target_log_probs, *node
  )


def children(draft: Draft, nodes: Array) -> Array:
  """[B, ..., N] bool: the nodes right below nodes [B, ...]."""
  parents = parents_of(draft)
  parents = parents.reshape(
    parents.shape[0], *(1,) * (nodes.ndim - 1), parents.shape[1]
  )
  return parents == nodes[..., None]


def _first_child(draft: Draft, kept: Array, depth: int):
  """From the root to the first kept child, and so on.

  Of children with one token the first is gone on from, whichever was accepted:
  it is the one whose children draft_tree.canonical makes theirs.
  """

  def descend(carry, _):
    node, num_accepted, alive = carry
    below = children(draft, node)
    alive &= jnp.any(below & kept, axis=-1)
    chosen = jnp.argmax(below & kept, axis=-1)
    token = jnp.take_along_axis(draft.tokens, chosen[:, None], axis=1)
    first = jnp.argmax(below & (draft.tokens == token), axis=-1)
    node = jnp.where(alive, first, node)
    return (node, num_accepted + alive, alive), node

  zero = jnp.zeros_like(draft.count)
  (last, num_accepted, _), path = jax.lax.scan(
    descend, (zero, zero, zero == 0), length=depth
  )
  path = jnp.concatenate([zero[:, None], path.T], axis=1)
  return path, num_accepted, last


def _first_child_prefix_acceptance(
  draft: Draft, accept_prob: Array, depth: int
) -> Array:
  def row(tokens, parents, accept_prob):  # [N] each
    earlier = draft_tree.earlier_siblings(parents)
    refused = jnp.where(earlier, 1.0 - accept_prob[None, :], 1.0)
    chosen = accept_prob * jnp.prod(refused, axis=-1)
    same = parents[:, None] == parents[None, :]
    same &= tokens[:, None] == tokens[None, :]
    first = jnp.argmax(same, axis=-1)
    entered = jnp.zeros_like(accept_prob).at[first].add(chosen).at[0].set(1.0)
    above = draft_tree.ancestors(parents)  # the node itself included
    reached = jnp.prod(jnp.where(above, entered[None, :], 1.0), axis=-1)
    at_depth = jnp.zeros((depth + 1,)).at[draft_tree.depth(parents)]
    return at_depth.add(reached)[1:]

  accept_prob = jnp.where(drafted(draft), accept_prob, 0.0)
  return jax.vmap(row)(draft.tokens, parents_of(draft), accept_prob)


def _last_success(draft: Draft, kept: Array, depth: int):
  """Of a chain, everything up to the last kept node."""
  del draft
  node = jnp.arange(kept.shape[1])
  last = jnp.max(jnp.where(kept, node[None], 0), axis=-1)
  step = jnp.arange(depth + 1)
  return jnp.minimum(step[None], last[:, None]), last, last


def _last_success_prefix_acceptance(
  draft: Draft, accept_prob: Array, depth: int
) -> Array:
  accept_prob = jnp.where(drafted(draft), accept_prob, 0.0)
  refused = jnp.cumprod(1.0 - accept_prob[:, ::-1], axis=1)[:, ::-1]
  return 1.0 - refused[:, 1 : depth + 1]


def _longest(draft: Draft, kept: Array, depth: int):
  """To the deepest node that is kept with all above it; the first of those."""
  parents = parents_of(draft)
  above = draft_tree.ancestors(parents)  # [B, N, N], the node itself included
  root = jnp.arange(kept.shape[1]) == 0
  alive = jnp.all(~above | kept[:, None, :] | root[None, None], axis=-1)
  height = draft_tree.depth(parents)
  last = jnp.argmax(jnp.where(alive, height, -1), axis=-1)
  return _path_to(last, above, height, depth)


def _path_to(last: Array, above: Array, height: Array, depth: int):
  """The path from the root to `last` [B], the last node repeated.

  Args:
    above: [B, N, N], of draft_tree.ancestors.
    height: [B, N], of draft_tree.depth.
  """
  row = jnp.arange(len(last))
  num_accepted = height[row, last]
  step = jnp.minimum(jnp.arange(depth + 1)[None], num_accepted[:, None])
  on_path = above[row, last][:, None, :]
  on_path &= height[:, None, :] == step[..., None]
  return jnp.argmax(on_path, axis=-1), num_accepted, last


def _longest_prefix_acceptance(
  draft: Draft, accept_prob: Array, depth: int
) -> Array:
  """For rules of certainties: accept_prob is 0 or 1."""
  kept = (accept_prob > 0.5) & drafted(draft)
  _, num_accepted, _ = _longest(draft, kept, depth)
  reached = jnp.arange(1, depth + 1)[None] <= num_accepted[:, None]
  return reached.astype(jnp.float32)


def _post_order(draft: Draft, kept: Array, depth: int):
  """To the first kept node in post-order, the root if there is none before."""
  parents = parents_of(draft)
  kept = kept.at[:, 0].set(True)
  place = draft_tree.post_order(parents)
  last = jnp.argmin(jnp.where(kept, place, kept.shape[1]), axis=-1)
  above, height = draft_tree.ancestors(parents), draft_tree.depth(parents)
  return _path_to(last, above, height, depth)


def _post_order_prefix_acceptance(
  draft: Draft, accept_prob: Array, depth: int
) -> Array:
  parents = parents_of(draft)
  accept_prob = jnp.where(drafted(draft), accept_prob, 0.0)
  place = draft_tree.post_order(parents)
  before = place[:, None, :] < place[:, :, None]  # [B, n, m]: m before n
  refused = jnp.where(before, 1.0 - accept_prob[:, None, :], 1.0)
  ends = accept_prob * jnp.prod(refused, axis=-1)
  step = jnp.arange(1, depth + 1)[None, :, None]
  deep = draft_tree.depth(parents)[:, None, :] >= step  # [B, D, N]
  return jnp.sum(jnp.where(deep, ends[:, None, :], 0.0), axis=-1)


TRAVERSALS = {
  # step.py follows it.
  "coupled": Traversal(None, _first_child_prefix_acceptance),
  "first_child": Traversal(_first_child, _first_child_prefix_acceptance),
  "last_success": Traversal(_last_success, _last_success_prefix_acceptance),
  "longest": Traversal(_longest, _longest_prefix_acceptance),
  "post_order": Traversal(_post_order, _post_order_prefix_acceptance),
}
