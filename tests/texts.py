"""What the tests of the loop share: texts of rows, copies, whole passes."""

import jax
import jax.numpy as jnp
import numpy as np


def texts(state) -> list[tuple[int, ...]]:
  """Every row's committed tokens."""
  tokens, length = np.asarray(state.tokens), np.asarray(state.length)
  return [tuple(row[:n].tolist()) for row, n in zip(tokens, length)]


def frozen(state):
  """A copy on the host, so that the state may be donated."""
  state = state.replace(keys=jax.random.key_data(state.keys))
  return jax.tree.map(np.array, state)


def forward(model, params, tokens) -> np.ndarray:
  """[B, L, V] logits of one pass over whole texts."""
  batch, size = tokens.shape
  cache = model.init_cache(batch, size)
  return jax.jit(lambda p, t: model.apply(p, t, cache)[0].logits)(
    params, jnp.asarray(tokens)
  )
