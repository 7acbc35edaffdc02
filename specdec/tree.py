"""Draft trees as parent indices: who stands above whom, and how deep.

SpecInfer (arXiv:2305.09781), section 3. Invariant: level order, so a parent
precedes its children, and the root's parent is -1. Every function takes NumPy
or JAX arrays and answers in kind: a static tree stays static.
"""

import itertools

import jax
import numpy as np


def chain(num_nodes: int) -> np.ndarray:
  """Parents of a chain: node n hangs below node n - 1. [N] int32."""
  return np.arange(num_nodes, dtype=np.int32) - 1


def parallel(num_chains: int, length: int) -> np.ndarray:
  """Parents of several chains below one root, level by level. [N] int32."""
  nodes = np.arange(1, 1 + num_chains * length)
  return np.concatenate([[-1], np.maximum(nodes - num_chains, 0)]).astype(
    np.int32
  )


def from_paths(paths) -> np.ndarray:
  """Parents of a static tree. [N] int32, the root included.

  Args:
    paths: one for each node but the root: which child to take at every step
      down to it, counted from 0, as in Medusa's choices: (0,), (1,), (0, 0).

  Raises:
    ValueError: a path twice, or one whose parent or earlier sibling is absent,
      or which stands before its parent.
  """
  paths = [tuple(int(step) for step in path) for path in paths]
  number = {(): 0}
  for path in sorted(paths, key=lambda path: (len(path), path)):
    if not path or min(path) < 0:
      raise ValueError(f"{path} is no path: give child numbers, from 0")
    if path in number:
      raise ValueError(f"path {path} is there twice")
    if path[:-1] not in number:
      raise ValueError(f"path {path} has no parent {path[:-1]}")
    if path[-1] and (*path[:-1], path[-1] - 1) not in number:
      raise ValueError(f"path {path} has no sibling {path[-1] - 1} before it")
    number[path] = len(number)
  seen = {()}
  for path in paths:
    if path[:-1] not in seen:
      raise ValueError(f"path {path} stands before its parent {path[:-1]}")
    seen.add(path)
  return np.array(
    [-1] + [number[path[:-1]] for path in list(number)[1:]], np.int32
  )


def levels(parents: np.ndarray) -> list[slice]:
  """Nodes of every depth of a static tree, the root's first.

  Raises:
    ValueError: the tree is not in level order.
  """
  depths = depth(parents)
  if np.any(np.diff(depths) < 0):
    raise ValueError(f"parents = {parents.tolist()} are not in level order")
  ends = np.searchsorted(depths, np.arange(depths[-1] + 2))
  return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def ancestors(parents):
  """Node j lies on the path from the root to node n, n itself included.

  Args:
    parents: [..., N].

  Returns:
    [..., N, N] bool, indexed [n, j].
  """
  num_nodes = parents.shape[-1]
  flat = (1,) * (parents.ndim - 1)
  index = np.arange(num_nodes).reshape(*flat, 1, num_nodes)
  own = np.eye(num_nodes, dtype=bool).reshape(*flat, num_nodes, num_nodes)
  reach = (parents[..., :, None] == index) | own
  for _ in range(max(num_nodes - 1, 1).bit_length()):  # paths double in length
    hops = reach.astype(np.int32)
    reach = (hops @ hops) > 0
  return reach


def depth(parents):
  """[..., N] int32: steps from the root, which has depth 0."""
  return ancestors(parents).sum(-1, dtype=np.int32) - 1


def sibling_rank(parents):
  """[N] int32: how many earlier nodes share node n's parent."""
  index = np.arange(parents.shape[-1])
  same = parents[:, None] == parents[None, :]
  return (same & (index[None, :] < index[:, None])).sum(-1, dtype=np.int32)


def previous_sibling(parents):
  """[N] int32: the latest earlier node with node n's parent, or -1."""
  index = np.arange(parents.shape[-1], dtype=np.int32)
  earlier = (parents[:, None] == parents[None, :]) & (
    index[None, :] < index[:, None]
  )
  return (earlier * (index[None, :] + 1)).max(-1) - 1


def max_siblings(parents):
  """Children of the most fruitful node: an int where the tree is static."""
  rank = sibling_rank(parents)[1:]
  if rank.shape[0] == 0:
    return 0
  widest = rank.max() + 1
  return widest if isinstance(widest, jax.Array) else int(widest)
