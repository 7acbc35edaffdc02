"""What acceptance rules share: the law of a draw, and what a refusal leaves."""

import jax
import jax.numpy as jnp

from specdec.types import Array, Draft


def drawn_from(draft: Draft, node: Array, vocab_size: int) -> Array:
  """[..., V] the law that node [...] was drawn from."""
  if draft.log_probs is None:
    return jax.nn.one_hot(draft.tokens[node], vocab_size)
  return jnp.exp(draft.log_probs[node])


def remainder(law: Array, drawn: Array) -> Array:
  """norm(relu(law - drawn)) over the last axis; `law` where nothing is left.

  `law` need not be normalised. Nothing is left only where a refusal has
  probability 0.
  """
  rest = jnp.maximum(law - drawn, 0.0)
  mass = jnp.sum(rest, axis=-1, keepdims=True)
  return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), law)
