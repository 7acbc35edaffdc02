"""SpecTr's k-SEQ: several i.i.d. drafts of one token, each evaluated alike.

Sun et al. (arXiv:2310.15141), algorithm 3 and theorem 2; k there is m here, the
number of children of a node. Every child x, drawn from q, is kept with
probability min(1, p(x) / (rho q(x))), whatever became of its earlier siblings.
Invariant: rho is at least the root rho* of 1 - (1 - beta)^m = rho beta, with
beta(rho) = sum_x min(p(x) / rho, q(x)): then what is left of the target's
distribution is nowhere negative. It keeps at least 1 - 1/e of what the best
coupling of p with m draws could keep.
"""

import jax
import jax.numpy as jnp

from specdec.acceptance.distributions import prob_of_tokens, remainder
from specdec.types import AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached

# The bracket's upper end is taken, which is valid however wide it still is;
# 20 halvings leave it (m - 1) / 10^6 wide.
_HALVINGS = 20


def _beta(distribution: Array, drawn: Array, rho: Array) -> Array:
  """P(one draw is kept) for distributions [V]."""
  return jnp.sum(jnp.minimum(distribution / rho, drawn))


def _any_kept(beta: Array, num_draws: Array) -> Array:
  """P(one of the draws is kept) = 1 - (1 - beta)^m, also where beta is tiny."""
  beta = jnp.clip(beta, 0.0, 1.0)
  return -jnp.expm1(num_draws * jnp.log1p(-beta))


def _rho(distribution: Array, drawn: Array, num_draws: Array) -> Array:
  """The smallest valid rho of distributions [V], by bisection from above."""

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    beta = _beta(distribution, drawn, middle)
    too_small = _any_kept(beta, num_draws) > middle * beta
    return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

  one = jnp.ones((), distribution.dtype)
  most = jnp.maximum(num_draws, 1).astype(distribution.dtype)
  return jax.lax.fori_loop(0, _HALVINGS, halve, (one, most))[1]


def _below(draft: Draft, node: Array) -> Array:
  """[N] bool: children of `node` that are in use."""
  parents = jnp.asarray(draft.parents)
  return (parents == node) & (jnp.arange(len(parents)) < draft.count)


def _accept_prob(draft: Draft, target_log_probs: Array) -> Array:
  if draft.log_probs is None:  # the root alone
    return jnp.ones(len(target_log_probs))
  nodes = jnp.arange(len(target_log_probs))
  below = jax.vmap(lambda node: _below(draft, node))(nodes)  # [N, N]
  num_draws = jnp.sum(below, axis=-1)
  # Few nodes have several children; only those need a rho other than 1.
  order = jnp.argsort(num_draws < 2)

  def solve(i: Array, rho: Array) -> Array:
    node = order[i]
    distribution = jnp.exp(target_log_probs[node])
    drawn = jnp.exp(draft.log_probs[jnp.argmax(below[node])])
    return rho.at[node].set(_rho(distribution, drawn, num_draws[node]))

  rho = jax.lax.fori_loop(
    0, jnp.sum(num_draws >= 2), solve, jnp.ones(nodes.shape)
  )
  above = jnp.maximum(jnp.asarray(draft.parents), 0)
  target = prob_of_tokens(draft, target_log_probs)
  scaled = rho[above] * jnp.exp(draft.log_probs[nodes, draft.tokens])
  # Without a division by zero: what has no probability was not drawn.
  return jnp.where(
    scaled > target, target / jnp.where(scaled > 0, scaled, 1.0), 1.0
  )


def _residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
  distribution = jnp.exp(target_log_probs[node])
  if draft.log_probs is None:
    return distribution
  below = _below(draft, node)
  num_draws = jnp.sum(below)
  drawn = jnp.exp(draft.log_probs[jnp.argmax(below)])
  rho = _rho(distribution, drawn, num_draws)
  beta = _beta(distribution, drawn, rho)
  # Where beta is 0 no token has both distributions, and nothing is taken off.
  share = _any_kept(beta, num_draws) / jnp.where(beta > 0, beta, 1.0)
  kept = jnp.minimum(distribution / rho, drawn) * share
  left = remainder(distribution, kept)
  return jnp.where(num_draws > 0, left, distribution)


@cached
def kseq() -> AcceptanceRule:
  """The rule above, for i.i.d. children; on a chain it is rejection.

  I.i.d. chains should be joined where they begin alike (draft_tree.canonical,
  as draft_shape.static does): a node that three chains share has three
  children drawn from it.
  """
  kinds = frozenset({"none", "iid"})
  return AcceptanceRule(
    _accept_prob, _residual, "first_child", kinds, lossless=True, name="kseq"
  )
