"""Greedy multi-path block verification: the best of several i.i.d. chains.

arXiv:2602.16961. From the root it takes, of the drafted children, the one
whose token the target likes most beyond the draft; the chain that it ends on is
evaluated by block verification, as if it had been drawn alone from the
distribution that such a choice has. Invariant: the order of the tokens after a
text depends on that text alone, so the chosen chain is the last of K i.i.d.
ones in the order of a dictionary, and comes with probability F^K - f^K, where f
and F are the mass of all chains before it, and with it.

The paper orders tokens by the ratio of the two distributions, which takes a
sort of the vocabulary. Here they are ordered by steps of that ratio (half an
octave), and by number within one (rule 11): the distribution of the text is
the target's for any order.
"""

import jax
import jax.numpy as jnp

from specdec import draft_tree
from specdec.types import AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached

# The error of float32 grows with the number of chains: with so many the chosen
# chain's distribution is right to a total variation of 1e-6.
MOST_CHAINS = 32
_STEPS, _WIDEST = 32, 8.0  # steps of log2(p / q), from -8 to 8
_BLOCK = 64  # tokens that are summed one after another


def _place(target: Array, drawn: Array) -> Array:
  """[V] int32: the step of each token's ratio p / q, from low to high."""
  drawable = (target > 0) & (drawn > 0)
  ratio = jnp.where(drawable, target, 1.0) / jnp.where(drawable, drawn, 1.0)
  share = (jnp.log2(ratio) + _WIDEST) / (2 * _WIDEST)
  step = jnp.clip(share * _STEPS, 0, _STEPS - 1).astype(jnp.int32)
  return jnp.where(drawable, step, 0)


def _mass_before(drawn: Array, place: Array) -> Array:
  """[V] what a draw has of tokens before each, by place and then by number.

  Neither a sort nor a sum along the vocabulary for every step: blocks of it are
  gone through at once.
  """
  steps, size = jnp.arange(_STEPS)[:, None], drawn.shape[0]
  drawn, place = (
    jnp.pad(x, (0, -size % _BLOCK)).reshape(-1, _BLOCK).T
    for x in (drawn, place)
  )

  def add(held, token):  # a token of every block; held [steps, blocks]
    own, at = token
    here = steps == at[None]
    before = jnp.sum(jnp.where(here, held, 0.0), axis=0)
    return held + jnp.where(here, own[None], 0.0), before

  empty = jnp.zeros((_STEPS, drawn.shape[1]), drawn.dtype)
  held, within = jax.lax.scan(add, empty, (drawn, place))
  total = jnp.sum(held, axis=1, keepdims=True)  # [steps, 1]
  before = jnp.cumsum(held, axis=1) - held + jnp.cumsum(total, axis=0) - total
  return (within + jnp.take_along_axis(before, place, axis=0)).T.ravel()[:size]


def _mean_power(high: Array, low: Array, num: Array) -> Array:
  """(high^num - low^num) / (high - low), as a sum: nothing cancels."""

  def add(_, carry):
    total, power = carry
    return total * high + power, power * low

  start = jnp.zeros_like(low), jnp.ones_like(low)
  return jax.lax.fori_loop(0, num, add, start)[0]


def _chosen(drawn, before, below, mass, num):
  """[V] the distribution of the chosen chain's next token.

  Args:
    drawn: [V] what each chain's is drawn from.
    before: [V] `_mass_before`.
    below, mass: of the chains before this text, and of those that begin with
      it; their sum is 1.
    num: chains drawn.
  """
  low = below + mass * before
  powers = _mean_power(low + mass * drawn, low, num)
  chosen = drawn * powers
  return chosen / jnp.sum(chosen)


def _follow_chosen(draft: Draft, target_log_probs: Array, wanted: Array):
  """Follows the chosen chain.

  Returns:
    [N] each node's probability of being accepted once those after it on the
    chain were refused, 0 off the chain, and [V] what follows node `wanted`.
  """
  num_nodes, vocab_size = target_log_probs.shape
  parents = jnp.asarray(draft.parents)
  height = jnp.asarray(draft_tree.depth(draft.parents))
  used = jnp.arange(num_nodes) < draft.count
  num = jnp.sum(used & (height == 1))
  # A level that is there in part is not there: the best of fewer chains has
  # another distribution.
  alike = height[:, None] == height[None, :]
  used &= jnp.sum(alike & used[None, :], axis=-1) == num

  def level(_, carry):
    here, weight, below, mass, accept, follows = carry
    children = used & (parents == here)
    alive = jnp.any(children)
    target = jnp.exp(target_log_probs[here])
    drawn = jnp.exp(draft.log_probs[jnp.argmax(children)])
    drawn = jnp.where(alive, drawn, target)  # of nodes not in use: anything
    place = _place(target, drawn)
    before = _mass_before(drawn, place)
    chosen = _chosen(drawn, before, below, mass, num)

    left = jnp.maximum(weight * target - chosen, 0.0)
    total = jnp.sum(left)
    whole = total + (1.0 - weight)  # in this order: total may be far below 1
    inner = jnp.where(whole > 0, total / jnp.where(whole > 0, whole, 1.0), 1.0)
    accept = accept.at[here].set(jnp.where(alive, inner, accept[here]))
    left = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), target)
    follows = jnp.where(alive & (here == wanted), left, follows)

    order = place[draft.tokens] * vocab_size + draft.tokens
    child = jnp.argmax(jnp.where(children, order, -1))
    token = draft.tokens[child]
    fair = chosen[token] > 0
    ratio = weight * target[token] / jnp.where(fair, chosen[token], 1.0)
    ratio = jnp.where(fair, jnp.minimum(1.0, ratio), 1.0)
    accept = accept.at[child].set(jnp.where(alive, ratio, accept[child]))
    # Only the ratio of the two masses matters; deep down they would underflow.
    low, own = below + mass * before[token], mass * drawn[token]
    scale = jnp.where(low + own > 0, low + own, 1.0)
    moved = child, ratio, low / scale, own / scale
    kept = here, weight, below, mass
    moved = (jnp.where(alive, new, old) for new, old in zip(moved, kept))
    return *moved, accept, follows

  start = (
    jnp.int32(0), jnp.float32(1), jnp.float32(0), jnp.float32(1),
    jnp.zeros(num_nodes).at[0].set(1.0), jnp.exp(target_log_probs[wanted]),
  )  # fmt: skip
  depth = jnp.max(jnp.where(used, height, 0))
  return jax.lax.fori_loop(0, depth, level, start)[-2:]


def _accept_prob(draft: Draft, target_log_probs: Array) -> Array:
  if draft.log_probs is None:  # the root alone
    return jnp.ones(len(target_log_probs))
  return _follow_chosen(draft, target_log_probs, jnp.int32(0))[0]


def _residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
  if draft.log_probs is None:
    return jnp.exp(target_log_probs[node])
  return _follow_chosen(draft, target_log_probs, node)[1]


@cached
def multipath() -> AcceptanceRule:
  """The rule above, for chains drawn independently from the pending token.

  They must be joined where they begin alike (draft_tree.canonical, as
  draft_shape.static does). On one chain it is block verification. It pays where
  draft and target differ: the choice moves the distribution away from the
  draft's, and a draft that is the target's own is not accepted whole.
  """
  return AcceptanceRule(
    _accept_prob,
    _residual,
    "post_order",
    frozenset({"none", "iid"}),
    lossless=True,
    most_chains=MOST_CHAINS,
    name="multipath",
  )
