"""Recursive rejection sampling: one rule for chains and trees.

On a chain it is Leviathan et al. (arXiv:2211.17192) and Chen et al.
(arXiv:2302.01318); on a tree SpecInfer's multi-round rule (arXiv:2305.09781),
and with siblings drawn without replacement Sequoia's (arXiv:2402.12374).
Invariant: a child x drawn from D is kept with probability min(1, R(x) / D(x)),
and a refusal turns what is left of the target's distribution, R, into
norm(relu(R - D)).
"""

import jax
import jax.numpy as jnp

from specdec import draft_tree
from specdec.acceptance.distributions import (
  drawn_from,
  prob_of_tokens,
  ratio,
  remainder,
)
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


def _accept_prob(draft: Draft, target_log_probs: Array) -> Array:
  num_nodes, vocab_size = target_log_probs.shape
  parents = draft.parents
  nodes = jnp.arange(num_nodes)

  widest = draft_tree.max_siblings(parents)
  if isinstance(widest, int) and widest <= 1:  # a chain: no residual to carry
    return ratio(draft, prob_of_tokens(draft, target_log_probs))

  rank = jnp.asarray(draft_tree.sibling_rank(parents))
  previous = jnp.maximum(jnp.asarray(draft_tree.previous_sibling(parents)), 0)
  above = jnp.maximum(jnp.asarray(parents), 0)
  facing = jnp.exp(target_log_probs[above])  # [N, V] to verify node n against

  def pass_on(r: Array, facing: Array) -> Array:
    left = remainder(facing[previous], drawn_from(draft, previous, vocab_size))
    return jnp.where((rank == r)[:, None], left, facing)

  facing = jax.lax.fori_loop(1, widest, pass_on, facing)
  return ratio(draft, facing[nodes, draft.tokens])


def _residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
  num_nodes, vocab_size = target_log_probs.shape
  parents = draft.parents
  nodes = jnp.arange(num_nodes)
  rank = jnp.asarray(draft_tree.sibling_rank(parents))
  below = (jnp.asarray(parents) == node) & (nodes < draft.count)

  def pass_on(r: Array, distribution: Array) -> Array:
    ranked = below & (rank == r)
    drawn = drawn_from(draft, jnp.argmax(ranked), vocab_size)
    left = remainder(distribution, drawn)
    return jnp.where(jnp.any(ranked), left, distribution)

  distribution = jnp.exp(target_log_probs[node])
  return jax.lax.fori_loop(
    0, draft_tree.max_siblings(parents), pass_on, distribution
  )


@cached
def rejection() -> AcceptanceRule:
  """The rule above, for any siblings that say what they were drawn from."""
  kinds = frozenset(SIBLINGS)
  return AcceptanceRule(
    _accept_prob, _residual, "first_child", kinds, True, name="rejection"
  )
