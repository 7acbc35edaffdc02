"""Weight layouts for fast matrix products on CPU.

XLA's CPU backend transposes an [out, in] matrix at every product with two or
more tokens, which takes longer than the product. With weights in blocks
[out / 64, in, 64] it multiplies each block in place, so that verifying four
tokens takes 0.8 to 1.4 times as long as one (docs/results/passes.md). TPUs and
GPUs choose operand layouts themselves, so nothing is packed there.
"""

import functools

import jax
import jax.numpy as jnp

_BLOCK_SIZES = 64, 32, 16  # the first that divides the outputs is used
# Largest number of tokens N for which every block is multiplied with a copy of
# the activations (N / 64 of the matrix's size in all); beyond it the blocks are
# joined again.
MAX_BLOCKED_TOKENS = 128
# With at most so many weights a product with one token is slower than with two.
_SMALL_MATRIX = 600_000


def pack(params: dict, backend: str | None = None) -> dict:
  """Packs parameters for decoding on `backend`.

  On 'cpu' every matrix becomes [out / block, in, block], for `project` and
  `look_up` alone, not for training or saving. Elsewhere `params` is returned
  unchanged.

  Args:
    params: nested dict of arrays, emptied while it is packed, so that at most
      one matrix exists twice at any time.
    backend: None for JAX's default backend.
  """
  if (backend or jax.default_backend()) != "cpu":
    return params
  if isinstance(params, dict):
    return {name: pack(params.pop(name), "cpu") for name in list(params)}
  blocks = _BLOCK_SIZES if params.ndim == 2 else ()
  block = next((size for size in blocks if len(params) % size == 0), None)
  if block is None:
    return params
  # Blocks, because queued copies would hold every matrix twice.
  return jax.block_until_ready(_in_blocks(params, block))


@functools.partial(jax.jit, static_argnums=1)  # op by op it would copy twice
def _in_blocks(weight: jax.Array, block: int) -> jax.Array:
  """Reshapes [out, in] to [out / block, in, block]."""
  return weight.reshape(-1, block, weight.shape[1]).swapaxes(1, 2)


def project(weight: jax.Array, x: jax.Array, dtype=None) -> jax.Array:
  """Multiplies x [B, T, in] by a matrix [out, in], or packed: [B, T, out].

  Args:
    dtype: of the result; None for the weight's.
  """
  batch, num_tokens, width = x.shape
  flat = x.reshape(batch * num_tokens, width)
  dtype = dtype or weight.dtype
  if weight.ndim == 2:
    y = jax.lax.dot(weight, flat.T, preferred_element_type=dtype).T
  elif len(flat) <= MAX_BLOCKED_TOKENS:
    if len(flat) == 1 and weight.size <= _SMALL_MATRIX:
      flat = jnp.concatenate([flat, flat])
    copies = jnp.broadcast_to(flat[None], (len(weight), *flat.shape))
    y = jnp.einsum("gni,gio->gno", copies, weight, preferred_element_type=dtype)
    y = y.swapaxes(0, 1)[: batch * num_tokens]
  else:
    joined = weight.swapaxes(0, 1).reshape(width, -1)
    y = jax.lax.dot(flat, joined, preferred_element_type=dtype)
  return y.reshape(batch, num_tokens, -1)


def look_up(weight: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns rows [..., M] of a matrix [V, M], or of its packed form."""
  if weight.ndim == 2:
    return weight[tokens]
  block = weight.shape[2]
  return weight[tokens // block, :, tokens % block]
