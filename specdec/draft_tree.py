"""Draft trees as parent indices: ancestors, depth, siblings, shapes.

SpecInfer (arXiv:2305.09781), section 3. Invariant: level order, so a parent
precedes its children, and the root's parent is -1. Every function takes NumPy
or JAX arrays and answers in kind: a static tree stays static.
"""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np


def chain(num_nodes: int) -> np.ndarray:
  """Returns the parents of a chain, [N] int32: node n is a child of n - 1."""
  return np.arange(num_nodes, dtype=np.int32) - 1


def parallel(num_chains: int, length: int, shared: int = 0) -> np.ndarray:
  """Returns the parents of several chains from one root, [N] int32.

  Args:
    num_chains: how many, >= 1.
    length: tokens of each, what they share included.
    shared: how many tokens they begin with in common, in 0..length.

  Raises:
    ValueError: an argument out of range.
  """
  if num_chains < 1 or length < 0 or not 0 <= shared <= length:
    raise ValueError(
      f"{num_chains} chains of {length} tokens that share {shared}: there must "
      "be a chain, and they can share 0 tokens to all of them"
    )
  parents = [-1, *range(shared)]
  for _ in range(length - shared):
    level = len(parents)
    last = range(level - num_chains, level) if len(parents) > shared + 1 else ()
    parents += last or [shared] * num_chains
  return np.array(parents, np.int32)


def from_paths(paths) -> np.ndarray:
  """Returns the parents of a static tree, [N] int32, the root included.

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
  earlier = {()}
  for path in paths:
    if path[:-1] not in earlier:
      raise ValueError(f"path {path} stands before its parent {path[:-1]}")
    earlier.add(path)
  return np.array(
    [-1] + [number[path[:-1]] for path in list(number)[1:]], np.int32
  )


def optimal(acceptance, num_nodes: int) -> list[tuple[int, ...]]:
  """Returns the paths of the static tree with most expected acceptance.

  If a node's r-th child is accepted with probability acceptance[r], whatever
  its ancestors, a node is reached with the product along its path, and the sum
  of these is the expected number of accepted tokens: so the largest products
  are taken (Sequoia, arXiv:2402.12374; Medusa, arXiv:2401.10774, appendix). No
  tree of that size has more, as long as later children are not accepted more
  often than earlier ones.

  Args:
    acceptance: [R], by the child's rank; or [D, R], by its depth as well.
    num_nodes: how many nodes below the root.

  Returns:
    Paths for `from_paths`; fewer than num_nodes where the rest is worth 0.

  Raises:
    ValueError: a probability outside [0, 1], or children of one node that
      together are kept more than once.
  """
  acceptance = np.asarray(acceptance, float)
  if not np.all((acceptance >= 0) & (acceptance <= 1)):  # nor nan
    raise ValueError("acceptance must be in [0, 1]")
  if np.any(acceptance.sum(axis=-1) > 1 + 1e-9):
    raise ValueError("acceptance of one node's children must sum to 1 at most")
  by_depth = acceptance.ndim == 2

  def value(depth: int, rank: int) -> float:
    row = acceptance
    if by_depth:
      row = acceptance[depth] if depth < len(acceptance) else ()
    return float(row[rank]) if rank < len(row) else 0.0

  # (-product, path, the parent's product)
  frontier = [(-value(0, 0), (0,), 1.0)]
  chosen = []
  while frontier and len(chosen) < num_nodes:
    negative, path, above = heapq.heappop(frontier)
    if negative == 0:
      break
    chosen.append(path)
    depth, product = len(path), -negative
    rank = path[-1] + 1
    sibling = -above * value(depth - 1, rank)
    heapq.heappush(frontier, (sibling, (*path[:-1], rank), above))
    heapq.heappush(frontier, (-product * value(depth, 0), (*path, 0), product))
  return sorted(chosen, key=lambda path: (len(path), path))


def canonical(tokens, parents):
  """Joins equal prefixes at the first node that spells them.

  I.i.d. chains may begin alike. Children of a later copy of a node become
  children of the first one, so that a traversal which reaches this text has all
  of its continuations; the copy stays, a leaf, as one more draw among its
  siblings (without this k-SEQ accepts less: SpecTr, arXiv:2310.15141). Level
  order stays level order.

  Args:
    tokens: [..., N].
    parents: [N] or [..., N].

  Returns:
    [..., N] int32.
  """
  xp = jnp if isinstance(tokens, jax.Array) else np
  num_nodes = tokens.shape[-1]
  turns = num_nodes - 1
  if isinstance(parents, np.ndarray):
    turns = int(depth(parents).max())
  parents = xp.broadcast_to(xp.asarray(parents), tokens.shape)
  root = parents < 0
  above = xp.where(root, 0, parents)
  alike = tokens[..., :, None] == tokens[..., None, :]
  joined = xp.where(root, -1, above)
  for _ in range(turns):  # each is right one level deeper
    same = alike & (joined[..., :, None] == joined[..., None, :])
    first = xp.argmax(same, axis=-1)
    joined = xp.where(root, -1, xp.take_along_axis(first, above, axis=-1))
  return joined.astype(xp.int32)


def levels(parents: np.ndarray) -> list[slice]:
  """Returns the nodes of every depth of a static tree, the root's first.

  Raises:
    ValueError: it is no tree, or not in level order.
  """
  if len(parents) < 1 or parents[0] != -1:
    raise ValueError("node 0 is the root, whose parent is -1")
  for node, parent in enumerate(parents[1:].tolist(), 1):
    if not 0 <= parent < node:
      raise ValueError(f"node {node} stands before its parent {parent}")
  depths = depth(parents)
  if np.any(np.diff(depths) < 0):
    raise ValueError(f"parents = {parents.tolist()} are not in level order")
  ends = np.searchsorted(depths, np.arange(depths[-1] + 2))
  return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]


def ancestors(parents):
  """Returns whether node j is on the path from the root to n, n included.

  Args:
    parents: [..., N].

  Returns:
    [..., N, N] bool, indexed [n, j].
  """
  num_nodes = parents.shape[-1]
  if isinstance(parents, np.ndarray) and parents.ndim == 1:
    reach = np.eye(num_nodes, dtype=bool)
    if np.all(parents < np.arange(num_nodes)):  # parents come first
      for node, parent in enumerate(parents[1:], 1):
        reach[node] |= reach[parent]
      return reach
  flat = (1,) * (parents.ndim - 1)
  index = np.arange(num_nodes).reshape(*flat, 1, num_nodes)
  itself = np.eye(num_nodes, dtype=bool).reshape(*flat, num_nodes, num_nodes)
  reach = (parents[..., :, None] == index) | itself
  for _ in range(max(num_nodes - 1, 1).bit_length()):  # paths double in length
    hops = reach.astype(np.int32)
    reach = (hops @ hops) > 0
  return reach


def depth(parents):
  """[..., N] int32: steps from the root, which has depth 0."""
  return ancestors(parents).sum(-1, dtype=np.int32) - 1


def earlier_siblings(parents):
  """[N, N] bool, indexed [n, m]: m < n has node n's parent."""
  index = np.arange(parents.shape[-1], dtype=np.int32)
  same = parents[:, None] == parents[None, :]
  return same & (index[None, :] < index[:, None])


def sibling_rank(parents):
  """[N] int32: how many earlier nodes share node n's parent."""
  return earlier_siblings(parents).sum(-1, dtype=np.int32)


def previous_sibling(parents):
  """[N] int32: the latest earlier node with node n's parent, or -1."""
  index = np.arange(parents.shape[-1], dtype=np.int32)
  return (earlier_siblings(parents) * (index[None, :] + 1)).max(-1) - 1


def post_order(parents):
  """Each node's place in post-order: children in order, then their parent.

  Args:
    parents: [..., N].

  Returns:
    [..., N] int32: a node comes after everything below it and after the
    subtrees of its earlier siblings.
  """
  above = ancestors(parents)  # [..., n, j]: j is n or above it
  shape = (*(1,) * (parents.ndim - 1), *parents.shape[-1:] * 2)
  later = np.tri(shape[-1], k=-1, dtype=bool).reshape(shape)  # n after m
  earlier = later & (parents[..., :, None] == parents[..., None, :])
  size = above.sum(-2, dtype=np.int32)  # of the subtree of every node
  left = (earlier * size[..., None, :]).sum(-1, dtype=np.int32)
  first = (above * left[..., None, :]).sum(-1, dtype=np.int32)
  return first + size - 1


def max_siblings(parents):
  """Most children that a node has: an int where the tree is static."""
  rank = sibling_rank(parents)[1:]
  if rank.shape[0] == 0:
    return 0
  widest = rank.max() + 1
  return widest if isinstance(widest, jax.Array) else int(widest)
