"""Products of low-precision operands with float32 results, for training too."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_float32(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns jnp.einsum of two arrays of one type, accumulated in float32.

  Derivatives are products in the operands' type: a cotangent is rounded to it.
  Differentiated as it stands, a float32 product of bfloat16 operands has
  float32 products as derivatives, for which a CPU with AMX has no instructions.
  """
  return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _forward(subscripts, x, y):
  return einsum_float32(subscripts, x, y), (x, y)


def _backward(subscripts, operands, cotangent):
  product = functools.partial(jnp.einsum, subscripts)
  return jax.vjp(product, *operands)[1](cotangent.astype(operands[0].dtype))


einsum_float32.defvjp(_forward, _backward)
