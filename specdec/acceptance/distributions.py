"""What acceptance rules share: the distribution of a draw, and what a refusal
leaves.
"""

import jax
import jax.numpy as jnp

from specdec.types import Array, Draft


def drawn_from(draft: Draft, node: Array, vocab_size: int) -> Array:
  """[..., V] the distribution that node [...] was drawn from."""
  if draft.log_probs is None:
    return jax.nn.one_hot(draft.tokens[node], vocab_size)
  return jnp.exp(draft.log_probs[node])


def ratio(draft: Draft, prob_of_token: Array) -> Array:
  """[N] min(1, distribution / drawn) of every node's own token.

  Args:
    law_of_token: [N] what the distribution that a node faces says of its token.
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
  """norm(relu(distribution - drawn)) over the last axis; `distribution` where
  nothing is left.

  `distribution` need not be normalised. Nothing is left only where a refusal
  has probability 0.
  """
  rest = jnp.maximum(distribution - drawn, 0.0)
  mass = jnp.sum(rest, axis=-1, keepdims=True)
  return jnp.where(
    mass > 0, rest / jnp.where(mass > 0, mass, 1.0), distribution
  )
