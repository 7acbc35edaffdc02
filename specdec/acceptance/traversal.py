"""Traversal verification: a tree evaluated as a whole, from its leaves upward.

Weng et al. (arXiv:2505.12398). A node is refused only once everything below it
was, so later draft tokens may save an unlikely earlier one; on one path it is
block verification. Invariants: in post-order all nodes before a node were
refused when it is looked at, so its probability depends on the draft alone; a
node of weight w whose draft tokens below it are distributed as claimed is
accepted, or something below it is, with probability w, and the text after it
then has the target's distribution, however many children it has.
"""

import jax
import jax.numpy as jnp

from specdec.acceptance.distributions import drawn_from
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


def _refuse_all(draft: Draft, target_log_probs: Array) -> tuple[Array, Array]:
  """What is left of every node once all of its children were refused.

  Returns:
    [N] its weight, which is its probability of being accepted then, and [N, V]
    the distribution of the token that follows it.
  """
  num_nodes, vocab_size = target_log_probs.shape
  parents = jnp.asarray(draft.parents)

  def refuse(node: Array, carry):
    """Gives a node its weight, and takes its draws from its parent's share."""
    weights, distributions = carry
    parent, token = parents[node], draft.tokens[node]
    weight, distribution = weights[parent], distributions[parent]
    drawn = drawn_from(draft, node, vocab_size)
    # drawn = 0 was not drawn, and nodes not in use hold anything.
    fair = drawn[token] > 0
    ratio = weight * distribution[token] / jnp.where(fair, drawn[token], 1.0)
    own = jnp.where(fair, jnp.minimum(1.0, ratio), 1.0)
    rest = jnp.maximum(weight * distribution - drawn, 0.0)
    left = jnp.sum(rest)
    whole = left + (1.0 - weight)  # in this order: left may be far below 1
    used = node < draft.count
    # Nothing is left only where a refusal has probability 0 or the weight is.
    after = jnp.where(whole > 0, left / jnp.where(whole > 0, whole, 1.0), 1.0)
    after = jnp.where(used, after, weight)
    rest = jnp.where(left > 0, rest / jnp.where(left > 0, left, 1.0), 0.0)
    rest = jnp.where(used & (left > 0), rest, distribution)
    weights = weights.at[node].set(own).at[parent].set(after)
    return weights, distributions.at[parent].set(rest)

  # In level order a node comes after its parent and its earlier siblings, and
  # before everything below it.
  start = jnp.ones((num_nodes,)), jnp.exp(target_log_probs)
  return jax.lax.fori_loop(1, num_nodes, refuse, start)


def _accept_prob(draft: Draft, target_log_probs: Array) -> Array:
  return _refuse_all(draft, target_log_probs)[0]


def _residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
  return _refuse_all(draft, target_log_probs)[1][node]


@cached
def traversal() -> AcceptanceRule:
  """The rule above, for chains and trees.

  accept_prob[n] is given that every node before n in post-order was refused.
  Right for i.i.d. children, too: whether the chains of two that are equal are
  joined or not changes what is accepted, not the distribution. Its noise must
  never be positional (rule 4), as block verification's.
  """
  return AcceptanceRule(
    _accept_prob,
    _residual,
    "post_order",
    frozenset(SIBLINGS),
    lossless=True,
    name="traversal",
  )
