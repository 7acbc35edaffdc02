"""Finds where the end of a text stood before, for drafters that copy."""

import jax.numpy as jnp

from specdec.types import Array, Context


def with_source(context: Context) -> tuple[Array, Array]:
  """Returns the text [B, P + L] that may be copied, source first, and its
  length [B]."""
  if context.source is None:
    return context.tokens, context.length
  source, tokens = context.source.tokens, context.tokens
  both = jnp.concatenate([source, tokens], axis=1)
  column = jnp.arange(both.shape[1])[None]
  first = context.source.length[:, None]  # where the output begins
  index = jnp.where(column < first, column, column - first + source.shape[1])
  both = jnp.take_along_axis(
    both, jnp.minimum(index, both.shape[1] - 1), axis=1
  )
  return both, context.length + context.source.length


def match_lengths(tokens: Array, length: Array, most: int) -> Array:
  """Returns [L] how many tokens that end at each position equal the last ones.

  Args:
    tokens: [L] of one row, of which tokens[:length] is text.
    most: tokens compared at most; each is compared by code of its own.

  Returns:
    0..most; -1 at the last token itself and after it.
  """
  position = jnp.arange(tokens.shape[0])
  matched = jnp.zeros_like(position)
  unbroken = jnp.ones_like(position, dtype=bool)
  for back in range(most):
    last = tokens[jnp.maximum(length - 1 - back, 0)]
    same = jnp.roll(tokens, back) == last  # tokens[j - back]
    unbroken &= same & (position >= back) & (back < length)
    matched += unbroken
  return jnp.where(position < length - 1, matched, -1)
