"""Muon: gradient descent by orthogonalized momentum, for linear maps.

As Keller Jordan's, https://github.com/KellerJordan/Muon (MIT). In the place of
optax.contrib.muon, whose momentum has corrections of its bias: that iterates in
float32, and through a batch of one matrix, whose transpose XLA writes out on a
CPU in every iteration.
"""

import jax.numpy as jnp
import optax

from specdec.types import Array

# Of the quintic x -> ax + bx^3 + cx^5, iterated upon singular values.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
# Root mean square of an update, as AdamW's (Liu et al., arXiv:2502.16982).
_SIZE = 0.2


def scale_by_muon(
  momentum: float, dtype: jnp.dtype
) -> optax.GradientTransformation:
  """Replaces gradients of matrices by their orthogonalized Nesterov momentum.

  Args:
    dtype: of the products of the iteration; momentum is in the gradients' type.
  """

  def update(x: Array, _) -> Array:
    size = _SIZE * max(x.shape) ** 0.5
    return size * orthogonalize(x, dtype).astype(x.dtype)

  return optax.chain(
    optax.trace(momentum, nesterov=True), optax.stateless_with_tree_map(update)
  )


def orthogonalize(x: Array, dtype: jnp.dtype) -> Array:
  """Brings the singular values of a matrix near 1 by Newton-Schulz iteration.

  Those above a 500th of its Frobenius norm come to between 0.65 and 1.25.

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
