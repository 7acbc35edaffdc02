"""Filling a cache from a token buffer in static chunks, each row at its pace.

One function serves the target's prompt and a drafter that trails behind.
Invariant: `cache.length` ends at the goal wherever each row stood; the chunks
that reach past a row's goal leave scratch only.
"""

import jax
import jax.numpy as jnp

from specdec.types import KVCache, Model, ModelOutput, PyTree

CHUNK = 128  # tokens of one pass over a prompt


def advance(
  model: Model,
  params: PyTree,
  tokens: jax.Array,
  cache: KVCache,
  goal: jax.Array,
  *,
  chunk: int = CHUNK,
  features: tuple[int, ...] | None = None,
) -> tuple[KVCache, ModelOutput | None]:
  """Brings every row's cache up to `goal` committed positions.

  Args:
    tokens: [B, L]; the cache must have `chunk` slots past the largest goal.
    goal: [B]; rows already there stay where they are.
    chunk: tokens of one pass.
    features: None, or the layers whose entering streams are collected.

  Returns:
    The cache, and (features given) a ModelOutput over [B, L], zero where no
    token was run; logits None. Only positions a row ran are written.
  """
  batch, size = tokens.shape
  columns = jnp.arange(chunk)
  outputs = None
  if features is not None:
    shapes = jax.eval_shape(
      lambda t: model.apply(params, t, cache, head=False, features=features),
      jnp.zeros((batch, chunk), jnp.int32),
    )[0]
    outputs = jax.tree.map(
      lambda s: jnp.zeros((batch, size, s.shape[-1]), s.dtype), shapes
    )

  def unfinished(carry):
    return jnp.any(carry[0].length < goal)

  def step(carry):
    cache, outputs = carry
    index = cache.length[:, None] + columns[None]  # [B, chunk]
    piece = jnp.take_along_axis(tokens, jnp.minimum(index, size - 1), axis=1)
    output, cache = model.apply(
      params, piece, cache, head=False, features=features or ()
    )
    if outputs is not None:
      kept = jnp.where(index < goal[:, None], index, size)
      outputs = jax.tree.map(
        lambda buffer, new: jax.vmap(
          lambda b, i, n: b.at[i].set(n, mode="drop")
        )(buffer, kept, new),
        outputs,
        output,
      )
    length = jnp.maximum(cache.length, jnp.minimum(cache.length + chunk, goal))
    return cache.replace(length=length), outputs

  return jax.lax.while_loop(unfinished, step, (cache, outputs))
