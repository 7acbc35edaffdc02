"""What acceptance rules share: the draft's distributions, and residuals."""

import jax
import jax.numpy as jnp

from specdec.types import Array, Draft


def target_residual(
  draft: Draft, target_log_probs: Array, node: Array
) -> Array:
  """[V] a rule's residual that is the target's distribution after `node`."""
  return jnp.exp(target_log_probs[node])


def prob_of_tokens(draft: Draft, target_log_probs: Array) -> Array:
  """[N] the target's probability of each node's token after its parent."""
  above = jnp.maximum(jnp.asarray(draft.parents), 0)
  return jnp.exp(target_log_probs[above, draft.tokens])


def drawn_from(draft: Draft, node: Array, vocab_size: int) -> Array:
  """[..., V] the distribution that node [...] was drawn from."""
  if draft.log_probs is None:
    return jax.nn.one_hot(draft.tokens[node], vocab_size)
  return jnp.exp(draft.log_probs[node])


def ratio(draft: Draft, prob_of_token: Array) -> Array:
  """[N] min(1, target / drawn) of every node's own token.

  Args:
    prob_of_token: [N] the probability of a node's token under the distribution
      that it is verified against.
  """
  if draft.log_probs is None:
    return jnp.minimum(1.0, prob_of_token)
  nodes = jnp.arange(len(prob_of_token))
  drawn = jnp.exp(draft.log_probs[nodes, draft.tokens])
  # Without a division by zero: drawn = 0 was not drawn.
  return jnp.where(
    drawn > prob_of_token, prob_of_token / jnp.where(drawn > 0, drawn, 1.0), 1.0
  )


def remainder(distribution: Array, drawn: Array) -> Array:
  """norm(relu(distribution - drawn)) over the last axis.

  `distribution` need not be normalised. Where nothing is left, which is only
  where a refusal has probability 0, it is returned.
  """
  rest = jnp.maximum(distribution - drawn, 0.0)
  mass = jnp.sum(rest, axis=-1, keepdims=True)
  return jnp.where(
    mass > 0, rest / jnp.where(mass > 0, mass, 1.0), distribution
  )
