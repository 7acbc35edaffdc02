"""Block verification: a chain evaluated as a whole, optimal for a single path.

Sun et al. (arXiv:2403.10444). Invariant: every prefix has an independent
uniform draw, and the longest prefix whose draw succeeds is accepted, whatever
became of the shorter ones; w, the running ratio of the two distributions
clipped at 1, makes acceptance and residual add up to the target's distribution.
"""

import jax
import jax.numpy as jnp

from specdec.acceptance.distributions import drawn_from, remainder
from specdec.types import AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


def _running_ratio(draft: Draft, target_log_probs: Array) -> Array:
  """[N] w of the prefix that ends with each node; 1 at the root."""
  nodes = jnp.arange(1, len(target_log_probs))
  token = draft.tokens[nodes]
  target = jnp.exp(target_log_probs[nodes - 1, token])
  if draft.log_probs is None:
    drawn = jnp.ones_like(target)
  else:
    drawn = jnp.exp(draft.log_probs[nodes, token])
  used = nodes < draft.count

  def step(w, x):
    target, drawn, used = x
    # drawn = 0 was not drawn, and nodes not in use hold anything.
    fair = used & (drawn > 0)
    ratio = jnp.where(fair, w * target / jnp.where(fair, drawn, 1.0), 1.0)
    w = jnp.minimum(1.0, ratio)
    return w, w

  _, rest = jax.lax.scan(step, jnp.float32(1.0), (target, drawn, used))
  return jnp.concatenate([jnp.ones((1,)), rest])


def _accept_prob(draft: Draft, target_log_probs: Array) -> Array:
  num_nodes, vocab_size = target_log_probs.shape
  w = _running_ratio(draft, target_log_probs)
  nodes = jnp.arange(num_nodes)
  after = jnp.minimum(nodes + 1, num_nodes - 1)
  drawn = drawn_from(draft, after, vocab_size)
  distribution = w[:, None] * jnp.exp(target_log_probs)
  left = jnp.sum(jnp.maximum(distribution - drawn, 0.0), axis=-1)
  whole = left + (1.0 - w)  # in this order: left may be far below 1
  inside = jnp.where(whole > 0, left / jnp.where(whole > 0, whole, 1.0), 1.0)
  return jnp.where(nodes == draft.count - 1, w, inside)


def _residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
  num_nodes, vocab_size = target_log_probs.shape
  distribution = jnp.exp(target_log_probs[node])
  w = _running_ratio(draft, target_log_probs)[node]
  after = jnp.minimum(node + 1, num_nodes - 1)
  left = remainder(w * distribution, drawn_from(draft, after, vocab_size))
  return jnp.where(node + 1 < draft.count, left, distribution)


@cached
def block() -> AcceptanceRule:
  """The rule above, for chains. accept_prob[n] is of the prefix that ends at n.

  At temperature 0 it is token verification. Its noise must never be positional
  (rule 4): later draft tokens decide how much earlier text is kept.
  """
  return AcceptanceRule(
    _accept_prob,
    _residual,
    "last_success",
    frozenset({"none", "deterministic"}),
    lossless=True,
    chains_only=True,
    name="block",
  )
