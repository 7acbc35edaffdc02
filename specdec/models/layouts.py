"""Weights in the form that a backend multiplies fastest, and their products.

XLA's CPU backend transposes a [out, in] matrix anew at every product with two
tokens or more, which takes longer than the product. In blocks [out / 64, in,
64] each block is multiplied where it lies, and four tokens take 0.8 to 1.4
times one (docs/results.md): what a verification lives on. A TPU or GPU lays out
its operands itself: there, nothing is packed.
"""

import functools

import jax
import jax.numpy as jnp

_BLOCKS = 64, 32, 16  # outputs of a block: the first that divides them
# Tokens up to which each block is multiplied with a copy of them, all together
# N / 64 of the matrix's own size. For more the blocks are joined anew.
FEW = 128
# Of so few weights a product with one token takes longer than with two.
_SMALL = 600_000
_PACKED = frozenset(
  ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")  # decoders
  + ("fuse", "gather", "start", "token", "recycled", "residual")  # drafters
)


def pack(params: dict, backend: str | None = None) -> dict:
  """A decoder's parameters for decoding on `backend`, default JAX's own.

  On 'cpu' matrices become [out / block, in, block], block the first of _BLOCKS
  that divides `out`; such parameters are for `apply` alone, not for training or
  saving. Each matrix is taken out of `params` as it is packed, so that at most
  one exists twice.
  """
  if (backend or jax.default_backend()) != "cpu":
    return params
  return _pack(params, "")


def _pack(tree, parent: str):
  if isinstance(tree, dict):
    names = list(tree)
    return {
      name: _pack(tree.pop(name), parent if name == "weight" else name)
      for name in names
    }
  kind = parent.partition("_")[0]  # of several alike: residual_0, residual_1
  if tree.ndim != 2 or kind not in _PACKED:
    return tree
  block = next((b for b in _BLOCKS if len(tree) % b == 0), None)
  if block is None:
    return tree
  # Waited for: what is still queued would hold all matrices twice.
  return jax.block_until_ready(_in_blocks(tree, block))


@functools.partial(jax.jit, static_argnums=1)  # op by op, it would copy twice
def _in_blocks(weight: jax.Array, block: int) -> jax.Array:
  """[out, in] as [out / block, in, block]."""
  return weight.reshape(-1, block, weight.shape[1]).swapaxes(1, 2)


def project(weight: jax.Array, x: jax.Array, dtype=None) -> jax.Array:
  """[B, T, in] through [out, in], or its packed form, to [B, T, out]."""
  batch, num_tokens, width = x.shape
  flat = x.reshape(batch * num_tokens, width)
  dtype = dtype or weight.dtype
  if weight.ndim == 2:
    y = jax.lax.dot(weight, flat.T, preferred_element_type=dtype).T
  elif len(flat) <= FEW:
    if len(flat) == 1 and weight.size <= _SMALL:
      flat = jnp.concatenate([flat, flat])
    copies = jnp.broadcast_to(flat[None], (len(weight), *flat.shape))
    y = jnp.einsum("gni,gio->gno", copies, weight, preferred_element_type=dtype)
    y = y.swapaxes(0, 1)[: batch * num_tokens]
  else:
    joined = weight.swapaxes(0, 1).reshape(width, -1)
    y = jax.lax.dot(flat, joined, preferred_element_type=dtype)
  return y.reshape(batch, num_tokens, -1)


def look_up(weight: jax.Array, tokens: jax.Array) -> jax.Array:
  """Rows [..., M] of [V, M], or of its packed form."""
  if weight.ndim == 2:
    return weight[tokens]
  block = weight.shape[2]
  return weight[tokens // block, :, tokens % block]
