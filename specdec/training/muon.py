"""Muon: gradient descent by orthogonalized momentum, for linear maps.

optax.contrib.muon computes the same in float32 and through a batch of one
matrix, whose transpose XLA writes out on a CPU in every iteration.
"""

import jax.numpy as jnp
import optax

from specdec.types import Array

# Of the quintic x -> ax + bx^3 + cx^5, iterated upon singular values, from
# Keller Jordan's Muon: https://github.com/KellerJordan/Muon (MIT).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# Root mean square of an update, as AdamW's (Liu et al., arXiv:2502.16982).
_SIZE = 0.2


def scale_by_muon(
  momentum: float, dtype: jnp.dtype
) -> optax.GradientTransformation:
  """Replaces gradients of matrices by their orthogonalized Nesterov momentum.

  Args:
    dtype: of the products of the iteration, which bring singular values to
      about 1, between 0.7 and 1.2; momentum is in the gradients' type.
  """

  def update(x: Array, _) -> Array:
    size = _SIZE * max(x.shape) ** 0.5
    return size * orthogonalize(x, dtype).astype(x.dtype)

  return optax.chain(
    optax.trace(momentum, nesterov=True), optax.stateless_with_tree_map(update)
  )


def orthogonalize(x: Array, dtype: jnp.dtype) -> Array:
  """Brings the singular values of a matrix near 1 by Newton-Schulz iteration.

  Args:
    x: [m, n] floating.

  Returns:
    [m, n] dtype.
  """
  a, b, c = _QUINTIC
  x = (x / (jnp.linalg.norm(x) + 1e-8)).astype(dtype)
  tall = x.shape[0] > x.shape[1]  # the smaller of the two Gram matrices
  for _ in range(_ITERATIONS):
    gram = jnp.einsum("ki,kj->ij" if tall else "ik,jk->ij", x, x)
    powers = b * gram + c * (gram @ gram)
    x = a * x + (x @ powers if tall else powers @ x)
  return x
