"""The exact distribution of what a rule emits, over every draft that can be
drawn.

A distribution over texts is a list: distribution[d] has shape (V,) * (d + 1)
and says how token d + 1 is drawn after any d tokens. Every draft of positive
probability is enumerated, the rule's own code says what is kept of it, and the
rest is arithmetic in float64. For vocabularies of 2 to 5 and few nodes.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_tree, traversal
from specdec.types import AcceptanceRule, Draft

Distributions = Sequence[np.ndarray]


class Drafts(NamedTuple):
  """Drafts with the probability that each is drawn."""

  weight: np.ndarray  # [M]
  tokens: np.ndarray  # [M, N]; the pending token is 0
  parents: np.ndarray  # [M, N]
  drawn: np.ndarray | None  # [M, N, V] of each node, as handed over


class Outcome(NamedTuple):
  """What a rule does to a target's distribution in one round."""

  emitted: list[np.ndarray]  # [d]: (V,) * (d + 1) P(these tokens, no more)
  joint: np.ndarray  # (V,) * (D + 1): the same, continued by the target
  accepted: float  # expected accepted tokens
  drafts: int  # of positive probability


def text_distribution(distributions: Distributions) -> np.ndarray:
  """Joint distribution of all the tokens that `distributions` speaks about."""
  joint = np.ones(())
  for distribution in distributions:
    joint = joint[..., None] * distribution
  return joint


def after(
  distributions: Distributions, text: tuple[int, ...]
) -> list[np.ndarray]:
  """The distributions that remain once `text` stands."""
  return [distribution[text] for distribution in distributions[len(text) :]]


def path_of(parents, node: int) -> list[int]:
  """Nodes from below the root down to `node`."""
  path = []
  while node > 0:
    path.insert(0, node)
    node = int(parents[node])
  return path


def without(distribution: np.ndarray, taken) -> np.ndarray:
  """Distribution of a draw that avoids `taken`; uniform without support."""
  allowed = ~np.isin(np.arange(len(distribution)), taken)
  left = distribution * allowed
  left = left if left.sum() > 0 else allowed.astype(float)
  return left / left.sum()


def distribution_of_node(
  kind, parents, node, tokens, distributions
) -> np.ndarray:
  """[V] what `node` is drawn from, given the tokens of the nodes before it."""
  parent = parents[node]
  text = tuple(tokens[n] for n in path_of(parents, parent))
  distribution = distributions[len(text)][text]
  taken = [tokens[n] for n in range(1, node) if parents[n] == parent]
  if kind == "deterministic":  # children are the likeliest tokens, in order
    best = np.argsort(-distribution, kind="stable")[len(taken)]
    return np.eye(len(distribution))[best]
  if kind == "without_replacement":
    return without(distribution, taken)
  return distribution


def drafts(
  kind: str,
  parents: Sequence[int],
  distributions: Distributions,
  *,
  count: int | None = None,
  joined: bool = True,
) -> Drafts:
  """All drafts of positive probability of a static tree.

  Args:
    kind: how the children of a node are drawn, a kind of DraftSpec.siblings.
    parents: [N] in level order.
    distributions: distribution[d] for d < D, what the tokens are drawn from.
    count: nodes in use, default all; tokens of the others mean nothing.
    joined: i.i.d. nodes that spell one text are joined, as by
      draft_shape.static.
  """
  parents = tuple(int(parent) for parent in parents)
  size, vocab_size = len(parents), len(distributions[0])
  count = size if count is None else count
  weights, all_tokens, all_drawn = [], [], []
  for draft_token in itertools.product(range(vocab_size), repeat=count - 1):
    tokens = (0, *draft_token)
    weight, drawn = 1.0, np.full((size, vocab_size), 1.0 / vocab_size)
    for node in range(1, count):
      drawn[node] = distribution_of_node(
        kind, parents, node, tokens, distributions
      )
      weight *= drawn[node][tokens[node]]
      if weight <= 0:
        break
    else:
      rubbish = tuple(n % vocab_size for n in range(size - count))
      weights.append(weight)
      all_tokens.append(tokens + rubbish)
      all_drawn.append(drawn)
  tokens = np.array(all_tokens, np.int32)
  shape = np.broadcast_to(np.array(parents, np.int32), tokens.shape)
  if kind == "iid" and joined:
    shape = draft_tree.canonical(tokens, np.array(parents, np.int32))
  drawn = None if kind == "deterministic" else np.array(all_drawn)
  return Drafts(np.array(weights), tokens, shape, drawn)


@functools.cache
def _evaluate(rule: AcceptanceRule, parents: tuple[int, ...] | None):
  """Evaluates a rule on many drafts: accept_prob [M, N], residual [M, N, V].

  The tree is `parents`, or, with None, an argument. Cached by the rule's
  functions: a planted bug must come as new functions.
  """
  tree = None if parents is None else np.array(parents, np.int32)

  @jax.jit
  def evaluate(tokens, log_probs, count, target, parents):
    count = jnp.broadcast_to(count, tokens.shape[:1])
    draft = Draft(tokens, parents if tree is None else tree, log_probs, count)

    def residual(node):
      node = jnp.broadcast_to(node, tokens.shape[:1])
      return traversal.residuals(rule, draft, target, node)

    accept_prob = traversal.accept_probs(rule, draft, target)
    if rule.residual is None:
      return accept_prob, None
    nodes = jnp.arange(tokens.shape[1])
    return accept_prob, jax.vmap(residual, out_axes=1)(nodes)

  return evaluate


def log(distribution) -> np.ndarray:
  """Float32, -inf where there is no probability."""
  with np.errstate(divide="ignore"):
    return np.log(distribution).astype(np.float32)


def _padded(array, size):
  """Repeats the last row up to `size`: few shapes, few compilations."""
  if array is None:
    return None
  return np.concatenate([array, array[-1:].repeat(size - len(array), 0)])


class Evaluated(NamedTuple):
  """What a rule says of drafts; N are the nodes in use."""

  texts: list[list[tuple[int, ...]]]  # [M][N] tokens down to each node
  accept_prob: np.ndarray  # [M, N]
  residual: np.ndarray | None  # [M, N, V]; None: the rule has none


def evaluated(
  rule: AcceptanceRule,
  drafts: Drafts,
  target_distributions: Distributions,
  *,
  count: int | None = None,
  traced: bool = False,
  rubbish: float = 0.5,
) -> Evaluated:
  """Calls both functions of `rule` on these drafts.

  Args:
    target_distributions: distribution[d] for d <= D, the draft's depth.
    count: nodes in use, default all.
    traced: the tree is an argument even where all drafts have the same.
    rubbish: what stands in the distributions of nodes that are not in use.
  """
  _, tokens, parents, drawn = drafts
  num_drafts, size = tokens.shape
  count = size if count is None else count
  vocab_size = len(target_distributions[0])
  texts = [
    [tuple(row[path_of(shape, n)]) for n in range(size)]
    for row, shape in zip(tokens, parents)
  ]
  facing = log(
    [[target_distributions[len(text)][text] for text in row] for row in texts]
  )
  facing[:, count:] = rubbish
  log_probs = None if drawn is None else log(drawn)
  if log_probs is not None:
    log_probs[:, count:] = rubbish
  same = np.all(parents == parents[0])
  static = tuple(parents[0].tolist()) if same and not traced else None
  total = num_drafts
  if num_drafts > 1:
    total = max(total, vocab_size ** (size - 1))
  arrays = [_padded(x, total) for x in (tokens, log_probs, facing, parents)]
  values = _evaluate(rule, static)(*arrays[:2], jnp.int32(count), *arrays[2:])
  accept_prob, residual = (
    None if x is None else np.asarray(x, float)[:num_drafts, :count]
    for x in values
  )
  return Evaluated([row[:count] for row in texts], accept_prob, residual)


def emitted(
  rule: AcceptanceRule,
  drafts: Drafts,
  target_distributions: Distributions,
  **options,
) -> Outcome:
  """What `rule` makes of these drafts, in one round; arguments of `evaluated`.

  Raises:
    ValueError: the rule has no distribution to enumerate (traversal 'coupled').
  """
  if rule.traversal not in TRAVERSALS:
    raise ValueError(f"traversal = {rule.traversal!r} is not enumerated")
  weight, tokens, parents, _ = drafts
  vocab_size = len(target_distributions[0])
  depth = draft_tree.depth(parents)  # [M, N]
  texts, accept_prob, residual = evaluated(
    rule, drafts, target_distributions, **options
  )
  num_drafts, count = accept_prob.shape
  if not np.all(
    (accept_prob >= 0) & (accept_prob <= 1 + 1e-6) & np.isfinite(accept_prob)
  ):
    raise ValueError("accept_prob is no probability")
  if not np.all(residual >= 0):
    raise ValueError("residual is no distribution")
  # ends[:, n]: probability that node n is the last one on the path.
  ends = TRAVERSALS[rule.traversal](
    tokens[:, :count], parents[:, :count], accept_prob
  )
  levels = [np.zeros((vocab_size,) * (d + 1)) for d in range(depth.max() + 1)]
  mass = (weight[:, None] * ends)[:, :, None] * residual  # [M, count, V]
  for row in range(num_drafts):
    for node in range(count):
      levels[depth[row, node]][texts[row][node]] += mass[row, node]
  joint = levels[0]
  for level, distribution in zip(levels[1:], target_distributions[1:]):
    joint = joint[..., None] * distribution + level
  accepted = float(np.sum(weight[:, None] * ends * depth[:, :count]))
  return Outcome(levels, joint, accepted, num_drafts)


def _first_child_ends(tokens, parents, accept_prob):
  """Children in order; of equal ones the first is gone on from."""
  num_drafts, count = accept_prob.shape
  ends, reach = np.zeros((2, num_drafts, count))
  reach[:, 0] = 1.0
  row = np.arange(num_drafts)
  for node in range(count):
    ends[:, node] = reach[:, node]
    for child in range(node + 1, count):
      below = parents[:, child] == node
      same = (parents == node) & (tokens == tokens[:, child : child + 1])
      first = np.argmax(same, axis=1)
      reach[row, first] += np.where(
        below, ends[:, node] * accept_prob[:, child], 0.0
      )
      ends[:, node] *= np.where(below, 1.0 - accept_prob[:, child], 1.0)
  return ends


def _last_success_ends(tokens, parents, accept_prob):
  """Of a chain: the last node whose draw succeeds."""
  del tokens, parents
  ends = np.zeros_like(accept_prob)
  later = np.ones(len(accept_prob))
  for node in range(accept_prob.shape[1] - 1, 0, -1):
    ends[:, node] = later * accept_prob[:, node]
    later = later * (1.0 - accept_prob[:, node])
  ends[:, 0] = later
  return ends


def _longest_ends(tokens, parents, accept_prob):
  """The first of the deepest nodes kept with all above; keep is 0 or 1."""
  del tokens
  kept = accept_prob > 0.5
  kept[:, 0] = True
  alive = np.all(kept[:, None, :] | ~draft_tree.ancestors(parents), axis=-1)
  last = np.argmax(np.where(alive, draft_tree.depth(parents), -1), axis=1)
  ends = np.zeros_like(accept_prob)
  ends[np.arange(len(last)), last] = 1.0
  return ends


def _post_order_ends(tokens, parents, accept_prob):
  """The first node kept, children before their parent; the root is kept."""
  del tokens
  ends = np.zeros_like(accept_prob)
  for row, tree in enumerate(parents.tolist()):
    later = 1.0  # nothing was kept so far
    for node in _post_order(tree, 0):
      kept = accept_prob[row, node] if node else 1.0
      ends[row, node] = later * kept
      later *= 1.0 - kept
  return ends


def _post_order(tree: list[int], node: int) -> list[int]:
  """Nodes of a subtree, each after those below it."""
  below = [child for child, parent in enumerate(tree) if parent == node]
  return [n for child in below for n in _post_order(tree, child)] + [node]


# How a path ends: (tokens, parents, accept_prob) [M, N] -> [M, N].
TRAVERSALS = {
  "first_child": _first_child_ends,
  "last_success": _last_success_ends,
  "longest": _longest_ends,
  "post_order": _post_order_ends,
}


def generated(one_round, vocab_size: int, length: int) -> np.ndarray:
  """(V,) * length: the distribution of a text that rounds write one after
  another.

  Args:
    one_round: text -> Outcome of the round that begins after it, whose noise is
      its own.
    length: tokens; what the last round emits beyond is cut off.
  """
  distribution = np.zeros((vocab_size,) * length)
  open_ = {(): 1.0}  # texts at the end of a round, and their probability
  while open_:
    text = min(open_, key=len)
    probability = open_.pop(text)
    for level in one_round(text).emitted:
      for tokens in zip(*np.nonzero(level)):
        whole = text + tuple(int(token) for token in tokens)
        more = probability * level[tokens]
        if len(whole) >= length:
          distribution[whole[:length]] += more
        else:
          open_[whole] = open_.get(whole, 0.0) + more
  return distribution


def distance(distribution: np.ndarray, other: np.ndarray) -> float:
  """Total variation."""
  return float(np.abs(distribution - other).sum() / 2)


def random_distributions(
  seed: int, vocab_size: int, depth: int, temperature: float
) -> list[list[np.ndarray]]:
  """Draws a draft's distributions of `depth` tokens, a target's of one more.

  Their logits are normal with deviation 1.5.
  """
  rng = np.random.default_rng(seed)
  logits = [
    [rng.normal(scale=1.5, size=(vocab_size,) * (d + 1)) for d in range(length)]
    for length in (depth, depth + 1)
  ]
  return [[softmax(level, temperature) for level in side] for side in logits]


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
  """Probabilities of logits; one-hot at temperature 0."""
  if temperature == 0:
    return np.eye(logits.shape[-1])[logits.argmax(-1)]
  scaled = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
  return scaled / scaled.sum(-1, keepdims=True)
