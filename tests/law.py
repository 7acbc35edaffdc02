"""The exact law of what one round emits, by enumeration in float64.

A law over texts is a list: law[d] has shape (V,) * (d + 1) and says how token
d + 1 is drawn after any d tokens. Every draft that has positive probability is
enumerated, the rule's own code says what is kept, and every outcome is carried
on by the target's law to D + 1 tokens: a lossless rule emits the target's law.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling
from specdec.types import AcceptanceRule, Draft

KINDS = ("none", "iid", "without_replacement", "point_mass")


class Outcome(NamedTuple):
  """What a rule does to a target's law."""

  joint: np.ndarray  # (V,) * (D + 1) law of the first D + 1 tokens
  accepted: float  # expected accepted tokens
  drafts: int  # drafts of positive probability


def random_logits(seed: int, vocab_size: int, length: int, scale=1.5):
  """Logits of a random law over texts of `length` tokens, float32."""
  rng = np.random.default_rng(seed)
  return [
    (scale * rng.normal(size=(vocab_size,) * (d + 1))).astype(np.float32)
    for d in range(length)
  ]


_warp = jax.jit(sampling.warp)


def warp(logits, temperature=1.0, top_k=None, top_p=None):
  """The law of these logits under specdec's own warp, float64."""
  vocab_size = logits[0].shape[-1]
  flat = np.concatenate([level.reshape(-1, vocab_size) for level in logits])
  size = max(128, len(flat))  # one shape for all, so that it compiles once
  padded = np.zeros((size, vocab_size), np.float32)
  padded[: len(flat)] = flat
  settings = sampling.settings(size, temperature, top_k, top_p)
  law = np.exp(np.asarray(_warp(jnp.asarray(padded), settings), float))
  law = law[: len(flat)] / law[: len(flat)].sum(-1, keepdims=True)
  ends = np.cumsum([level.size // vocab_size for level in logits])
  return [
    part.reshape(level.shape)
    for part, level in zip(np.split(law, ends[:-1]), logits)
  ]


def text_law(laws) -> np.ndarray:
  """Joint law of all the tokens that `laws` speaks about."""
  joint = np.ones(())
  for law in laws:
    joint = joint[..., None] * law
  return joint


def depths(parents) -> np.ndarray:
  """[N] depth of every node, in plain Python."""
  depth = [0]
  for parent in parents[1:]:
    depth.append(depth[parent] + 1)
  return np.array(depth)


def path_of(parents, node: int) -> list[int]:
  """Nodes from below the root down to `node`."""
  path = []
  while node > 0:
    path.insert(0, node)
    node = parents[node]
  return path


def without(law: np.ndarray, seen) -> np.ndarray:
  """Law of a draw that avoids `seen`; uniform once the support is used up."""
  left = law.copy()
  left[list(seen)] = 0.0
  if left.sum() == 0:
    left = np.ones_like(law)
    left[list(seen)] = 0.0
  return left / left.sum()


def _drawn_from(kind, parents, node, tokens, laws) -> np.ndarray:
  """Law of `node`, given the tokens of the nodes before it."""
  parent = parents[node]
  context = tuple(tokens[n] for n in path_of(parents, parent))
  law = laws[len(context)][context]
  seen = [tokens[n] for n in range(1, node) if parents[n] == parent]
  if kind == "point_mass":  # children are the likeliest tokens, in order
    best = np.argsort(-law, kind="stable")[len(seen)]
    return np.eye(len(law))[best]
  if kind == "without_replacement":
    return without(law, seen)
  return law


def enumerate_drafts(kind, parents, draft_laws, count, *, drop=0.0):
  """All drafts of positive probability.

  Returns:
    weight [M], tokens [M, N], drawn [M, N, V]: the law each token came from.
    Nodes past `count` hold rubbish.
  """
  vocab_size = draft_laws[0].shape[0]
  size = len(parents)
  weights, all_tokens, all_drawn = [], [], []
  for guess in itertools.product(range(vocab_size), repeat=count - 1):
    tokens = (0, *guess)
    weight, drawn = 1.0, np.full((size, vocab_size), 1.0 / vocab_size)
    for node in range(1, count):
      law = _drawn_from(kind, parents, node, tokens, draft_laws)
      drawn[node] = law
      weight *= law[tokens[node]]
      if weight <= drop:
        break
    else:
      rubbish = tuple(n % vocab_size for n in range(size - count))
      weights.append(weight)
      all_tokens.append(tokens + rubbish)
      all_drawn.append(drawn)
  return np.array(weights), np.array(all_tokens, np.int32), np.array(all_drawn)


@functools.cache
def _evaluate(rule: AcceptanceRule, parents: tuple[int, ...], traced: bool):
  """keep [M, N] and next_law [M, N, V] of many drafts; static or traced tree.

  Cached by the rule's functions: a planted bug must come as new functions.
  """
  static = np.array(parents, np.int32)

  def one(tokens, log_probs, count, target, parents):
    draft = Draft(tokens, parents if traced else static, log_probs, count)
    nodes = jnp.arange(len(static))
    next_law = jax.vmap(lambda node: rule.next_law(draft, target, node))(nodes)
    return rule.keep(draft, target), next_law

  return jax.jit(jax.vmap(one, in_axes=(0, 0, None, 0, None)))


def _log(law) -> jax.Array:
  with np.errstate(divide="ignore"):
    return jnp.asarray(np.log(law), jnp.float32)


def _padded(arrays, size):
  """Repeats the last row up to `size`: few shapes, few compilations."""
  return [
    None if x is None else np.concatenate([x, x[-1:].repeat(size - len(x), 0)])
    for x in arrays
  ]


def emitted(
  rule: AcceptanceRule,
  parents,
  kind: str,
  draft_laws,
  target_laws,
  *,
  said="truth",
  count: int | None = None,
  traced: bool = False,
  rubbish: float = 0.5,
) -> Outcome:
  """What `rule` makes of every draft that can be drawn.

  Args:
    parents: [N], level order.
    kind: how the children of a node are drawn, one of KINDS.
    draft_laws: law[d] for d < D, what the tokens are really drawn from.
    target_laws: law[d] for d <= D.
    said: 'truth': the drafter hands over what it drew from; None: nothing (a
      deterministic draft); or other laws, said in their place: a lie.
    count: nodes in use, default all.
    traced: the tree is an argument, not a constant.
    rubbish: what stands in the laws of nodes that are not in use.
  """
  if rule.walk not in ("first_child", "last_success", "longest"):
    raise ValueError(f"walk = {rule.walk!r} is not enumerated")
  parents = tuple(int(p) for p in parents)
  count = len(parents) if count is None else count
  depth = depths(parents)
  vocab_size = target_laws[0].shape[0]
  weight, tokens, drawn = enumerate_drafts(kind, parents, draft_laws, count)
  num_drafts = len(weight)
  if isinstance(said, str):
    log_probs = None if kind == "point_mass" else _log(drawn)
  elif said is None:
    log_probs = None
  else:
    laws = [
      [
        _drawn_from("none", parents, node, row, said)
        if 0 < node < count
        else drawn[0][0]
        for node in range(len(parents))
      ]
      for row in tokens
    ]
    log_probs = _log(np.array(laws))
  if log_probs is not None:
    log_probs = np.array(log_probs)
    log_probs[:, count:] = rubbish
  paths = [path_of(parents, node) for node in range(len(parents))]
  facing = np.stack(
    [target_laws[len(p)][tuple(tokens[:, p].T)] if p
     else np.broadcast_to(target_laws[0], (num_drafts, vocab_size))
     for p in paths],
    axis=1,
  )  # fmt: skip
  facing = np.array(_log(facing))
  facing[:, count:] = rubbish
  padded = _padded(
    [tokens, log_probs, facing],
    num_drafts if num_drafts == 1 else vocab_size ** (len(parents) - 1),
  )
  keep, next_law = _evaluate(rule, parents, traced)(
    padded[0], padded[1], jnp.int32(count), padded[2],
    jnp.asarray(parents, jnp.int32),
  )  # fmt: skip
  keep = np.asarray(keep, float)[:num_drafts, :count]
  next_law = np.asarray(next_law, float)[:num_drafts, :count]
  assert np.all((keep >= 0) & (keep <= 1 + 1e-6)), "keep is no probability"
  assert np.all(next_law >= 0), "next_law is no law"

  # ends[:, n]: probability that node n is the last one on the path.
  ends = _ends(rule.walk, parents, keep)
  levels = [np.zeros((vocab_size,) * (d + 1)) for d in range(depth.max() + 1)]
  accepted = 0.0
  for node in range(count):
    stay = ends[:, node]
    mass = (weight * stay)[:, None] * next_law[:, node]
    if node == 0:
      levels[0] += mass.sum(0)
    else:
      np.add.at(levels[depth[node]], tuple(tokens[:, paths[node]].T), mass)
    accepted += depth[node] * float(np.sum(weight * stay))
  joint = levels[0]
  for level, law in zip(levels[1:], target_laws[1:]):
    joint = joint[..., None] * law + level
  return Outcome(joint, accepted, num_drafts)


def _ends(walk, parents, keep):
  """[M, count] probability that the path ends at each node."""
  num_drafts, count = keep.shape
  ends = np.zeros((num_drafts, count))
  if walk == "last_success":  # of a chain
    later = np.ones(num_drafts)
    for node in range(count - 1, 0, -1):
      ends[:, node] = later * keep[:, node]
      later = later * (1.0 - keep[:, node])
    ends[:, 0] = later
    return ends
  if walk == "longest":  # keep is 0 or 1
    kept = keep > 0.5
    kept[:, 0] = True
    depth = depths(parents[:count])
    alive = np.stack(
      [np.all(kept[:, path_of(parents, n)], axis=1) for n in range(count)],
      axis=1,
    )
    last = np.argmax(np.where(alive, depth, -1), axis=1)
    ends[np.arange(num_drafts), last] = 1.0
    return ends
  # Children in order; the first one kept is followed.
  reach = np.zeros((num_drafts, count))
  reach[:, 0] = 1.0
  for node in range(count):
    ends[:, node] = reach[:, node]
    for child in range(node + 1, count):
      if parents[child] == node:
        reach[:, child] = ends[:, node] * keep[:, child]
        ends[:, node] *= 1.0 - keep[:, child]
  return ends


def error(outcome: Outcome, target_laws) -> float:
  """Largest difference of the emitted joint law from the target's."""
  exact = text_law(target_laws[: outcome.joint.ndim])
  return float(np.abs(outcome.joint - exact).max())


def block_acceptance(draft_laws, target_laws) -> float:
  """Expected accepted tokens of a chain under block verification.

  The sum over prefixes of their draft probability times the running ratio of
  the two laws, clipped at 1 after every token (arXiv:2403.10444).
  """
  draft, w, total = np.ones(()), np.ones(()), 0.0
  for drawn, law in zip(draft_laws, target_laws):
    draft = draft[..., None] * drawn
    with np.errstate(divide="ignore", invalid="ignore"):
      ratio = np.where(drawn > 0, w[..., None] * law / drawn, 0.0)
    w = np.minimum(1.0, ratio)
    total += float(np.sum(draft * w))
  return total


def chain_acceptance(draft_laws, target_laws) -> float:
  """Expected accepted tokens of a chain under rejection, in closed form.

  Token l is accepted with the sum over texts of prod min(target, draft).
  """
  shared = [np.minimum(d, t) for d, t in zip(draft_laws, target_laws)]
  return sum(text_law(shared[: d + 1]).sum() for d in range(len(shared)))
