"""Drawing the children of a tree's nodes, level by level.

Invariant (DESIGN rule 6): the law that is handed over for a node is the one its
token came from, given its earlier siblings; no token is re-ranked or dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling, tree
from specdec.types import Array, Context

KINDS = ("iid", "without_replacement", "point_mass")


class Grown(NamedTuple):
  """A static tree with its tokens."""

  tokens: Array  # [B, N]
  log_probs: Array | None  # [B, N, V] the law of each; None: point masses


def check_kind(parents: np.ndarray, kind: str) -> str:
  """The kind of siblings this tree has: 'none' where no node has two children.

  Raises:
    ValueError: the kind is unknown.
  """
  if kind not in KINDS:
    raise ValueError(f"siblings = {kind!r}; accepted: {', '.join(KINDS)}")
  if tree.max_siblings(parents) <= 1 and kind != "point_mass":
    return "none"
  return kind


def run_part(parents: np.ndarray, level: slice) -> slice:
  """Of a level, the nodes up to the last one that has children."""
  fruitful = [n for n in range(level.start, level.stop) if n in parents]
  return slice(level.start, max(fruitful, default=level.start - 1) + 1)


def grow(
  parents: np.ndarray,
  kind: str,
  context: Context,
  logits: Array,
  run: Callable[[Array, slice, bool], Array | None],
  whole_levels: bool = False,
) -> Grown:
  """Draws a static tree below the pending token.

  Args:
    parents: [N] in level order.
    kind: how siblings are drawn, one of KINDS. 'without_replacement' takes the
      top of law + Gumbel noise (arXiv:1903.06059): with the noise of a coupled
      rule these are its top-k. 'point_mass': the likeliest tokens.
    logits: [B, V] after the pending token.
    run: (tokens [B, T], their nodes, whether logits are wanted) -> logits
      [B, T, V]; called once a level, for the nodes up to the last one that has
      children.
    whole_levels: run every node, leaves too.
  """
  pending = jnp.take_along_axis(
    context.tokens, context.length[:, None] - 1, axis=1
  )
  rank = tree.sibling_rank(parents)
  all_tokens = [pending[:, 0]]
  all_laws = [jnp.zeros_like(sampling.warp(logits, context.sampling))]
  facing = {0: logits}  # node -> logits after it
  for depth, level in enumerate(tree.levels(parents)[1:], 1):
    nodes = range(level.start, level.stop)
    families: dict[int, list[int]] = {}
    for node in sorted(nodes, key=lambda node: rank[node]):
      families.setdefault(int(parents[node]), []).append(node)
    drawn = {}
    for parent, children in families.items():
      drawn |= _siblings(kind, context, facing[parent], depth, children)
    for node in nodes:
      token, law = drawn[node]
      all_tokens.append(token)
      all_laws.append(law)
    part = run_part(parents, level)
    fruitful = part.stop > part.start
    if whole_levels:
      part = level
    if part.stop > part.start:
      after = run(jnp.stack(all_tokens[part], axis=1), part, fruitful)
    if fruitful:
      facing = {
        node: after[:, node - part.start]
        for node in range(part.start, part.stop)
      }
  laws = None if kind == "point_mass" else jnp.stack(all_laws, axis=1)
  return Grown(jnp.stack(all_tokens, axis=1), laws)


def _siblings(kind, context, logits, depth, children) -> dict:
  """node -> (token [B], law [B, V]) of the children of one node."""
  law = sampling.warp(logits, context.sampling)
  if kind == "iid":
    return {
      node: (sampling.argmax(law + context.noise(depth, node)), law)
      for node in children
    }
  if kind == "point_mass":
    score = logits.astype(jnp.float32)
  else:
    noise = context.noise(depth, children[0])
  column = jax.lax.broadcasted_iota(jnp.int32, law.shape, 1)
  taken = jnp.zeros(law.shape, bool)
  found = {}
  for node in children:
    left = jnp.where(taken, -jnp.inf, law)
    # Once the support is used up: uniform over the tokens not taken.
    used_up = jnp.all(jnp.isinf(left), axis=-1, keepdims=True)
    left = jnp.where(used_up & ~taken, 0.0, left)
    left = jax.nn.log_softmax(left)
    if kind == "point_mass":
      token = sampling.argmax(jnp.where(taken, -jnp.inf, score))
    else:
      token = sampling.argmax(left + noise)
    found[node] = token, left
    taken |= column == token[:, None]
  return found
