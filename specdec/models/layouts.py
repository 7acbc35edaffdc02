"""Weight layouts for fast matrix products on CPU.

With weights in blocks [out / 32, in, 32] the kernel of models/cpu_kernels.py
reads each weight once for several tokens, so that verifying eight costs little
more than one (docs/results/passes.md). Without a C++ compiler XLA multiplies
blocks of up to 64 outputs in place: of an [out, in] matrix it would write a
transposed copy at every product with two or more tokens. TPUs and GPUs choose
operand layouts themselves, so nothing is packed there.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specdec.models import cpu_kernels, quantization
from specdec.models.products import einsum_float32
from specdec.models.quantization import Quantized
from specdec.utils import huge_pages

_BLOCK_SIZES = 64, 32, 16  # for XLA: the first that divides the outputs
# Largest number of tokens N for which XLA multiplies every block with a copy of
# the activations (N / 64 of the matrix's size in all); beyond it the blocks are
# joined again.
MAX_BLOCKED_TOKENS = 128
# With at most so many weights a product with one token is slower than with two.
_SMALL_MATRIX = 600_000
# Types of four bits -> those of two in a byte.
_NIBBLES = {jnp.dtype(jnp.int4): jnp.int8, jnp.dtype(jnp.uint4): jnp.uint8}
_HALF = cpu_kernels.BLOCK // 2


def pack(params: dict, backend: str | None = None) -> dict:
  """Packs parameters for decoding on `backend`.

  On 'cpu' every matrix becomes [out / block, in, block], for `project` and
  `look_up` alone, not for training or saving, with the first block size that
  divides `out`: 32 for the kernels, or of 64, 32 and 16 without them. Elsewhere
  `params` is returned unchanged.

  Args:
    params: nested dict of arrays, emptied while it is packed, so that at most
      one matrix exists twice at any time.
    backend: None for JAX's default backend.
  """
  if (backend or jax.default_backend()) != "cpu":
    return params
  if isinstance(params, dict):
    return {name: pack(params.pop(name), "cpu") for name in list(params)}
  if isinstance(params, Quantized):
    blocks = len(params.values) % cpu_kernels.BLOCK == 0
    fits = cpu_kernels.available() and params.values.ndim == 2 and blocks
    return jax.tree.map(pack, params) if fits else params
  first = (cpu_kernels.BLOCK,) if cpu_kernels.available() else ()
  blocks = (*first, *_BLOCK_SIZES) if params.ndim == 2 else ()
  block = next((size for size in blocks if len(params) % size == 0), None)
  if block is None:
    return params
  # Blocks, because queued copies would hold every matrix twice.
  packed = jax.block_until_ready(_in_blocks(params, block))
  huge_pages.collapse(packed)
  return packed


@functools.partial(jax.jit, static_argnums=1)  # op by op it would copy twice
def _in_blocks(weight: jax.Array, block: int) -> jax.Array:
  """Reshapes [out, in] to [out / block, in, block], of 4 bits two a byte."""
  if weight.dtype not in _NIBBLES:
    return weight.reshape(-1, block, weight.shape[1]).swapaxes(1, 2)
  wide = _in_blocks(weight.astype(_NIBBLES[weight.dtype]), block)
  low, high = jnp.split(wide, 2, axis=2)
  return low & 15 | high << 4


def _halves(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns what bits 0 to 3 and bits 4 to 7 of bytes stand for."""
  return weight << 4 >> 4, weight >> 4  # of int8 with their sign


def quantize(params: dict, group: int = 256, bits: int = 8) -> dict:
  """Quantises every matrix of a model, embeddings included; packs it again.

  Biases, norms and mixtures of experts stay as they are.

  Args:
    params: nested dict of arrays, packed or not; left as it is.
    group, bits: as of `quantization.quantize`.
  """
  quantized = {}
  for name, x in params.items():
    if isinstance(x, dict):
      quantized[name] = x if "router" in x else quantize(x, group, bits)
    elif name == "weight":
      # One at a time, because queued copies would hold every matrix twice.
      small = jax.block_until_ready(_quantize(x, group, bits))
      quantized[name] = pack(small) if x.ndim == 3 else small
    else:
      quantized[name] = x
  return quantized


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(weight: jax.Array, group: int, bits: int) -> Quantized:
  return quantization.quantize(unpack(weight), group, bits)


def unpack(weight: jax.Array) -> jax.Array:
  """Returns a matrix [out, in] from itself or from its packed form."""
  if weight.ndim == 2:
    return weight
  if weight.shape[2] == _HALF and weight.dtype in _NIBBLES.values():
    weight = jnp.concatenate(_halves(weight), axis=2)
  return weight.swapaxes(1, 2).reshape(-1, weight.shape[1])


def project(
  weight: jax.Array | Quantized, x: jax.Array, dtype=None
) -> jax.Array:
  """Multiplies x [B, T, in] by a matrix [out, in], or packed: [B, T, out].

  Args:
    dtype: of the result; None for that of x.
  """
  return project_all([weight], x, dtype)[0]


def project_all(
  weights: Sequence[jax.Array | Quantized], x: jax.Array, dtype=None
) -> list[jax.Array]:
  """Multiplies x by several matrices, as `project` does by each of them.

  The kernels read them in one call, which spares the hand-over of work to
  threads that each would need.
  """
  flat = x.reshape(-1, x.shape[-1])
  dtype = dtype or x.dtype
  parts = [w if isinstance(w, Quantized) else (w,) for w in weights]
  if all(cpu_kernels.multiplies(values, flat) for values, *_ in parts):
    products = cpu_kernels.project(flat, *parts)
  else:
    products = [_by_xla(weight, flat, dtype) for weight in weights]
  return [y.astype(dtype).reshape(*x.shape[:-1], -1) for y in products]


def _by_xla(weight: jax.Array | Quantized, x: jax.Array, dtype) -> jax.Array:
  """Multiplies x [N, in] by a matrix, packed or not: [N, out]."""
  if isinstance(weight, Quantized):
    whole = quantization.dequantize(jax.tree.map(unpack, weight), x.dtype)
    return _times_rows(x, whole, dtype)
  if weight.dtype != x.dtype:
    weight = weight.astype(x.dtype)
  if weight.ndim == 2:
    return _times_rows(x, weight, dtype)
  if len(x) <= MAX_BLOCKED_TOKENS:
    copied = x
    if len(x) == 1 and weight.size <= _SMALL_MATRIX:
      copied = jnp.concatenate([x, x])
    copies = jnp.broadcast_to(copied[None], (len(weight), *copied.shape))
    y = jnp.einsum("gni,gio->gno", copies, weight, preferred_element_type=dtype)
    return y.swapaxes(0, 1)[: len(x)].reshape(len(x), -1)
  joined = weight.swapaxes(0, 1).reshape(x.shape[1], -1)
  return jax.lax.dot(x, joined, preferred_element_type=dtype)


def _times_rows(x: jax.Array, y: jax.Array, dtype) -> jax.Array:
  """Multiplies x [N, in] by the rows of y [M, in]: [N, M].

  Not x @ y.T: XLA multiplies bfloat16 on a CPU with AMX a fifth as fast when
  the transpose is an operation.
  """
  form = "ni,oi->no"
  return (
    jnp.einsum(form, x, y) if dtype == x.dtype else einsum_float32(form, x, y)
  )


def look_up(weight: jax.Array | Quantized, tokens: jax.Array) -> jax.Array:
  """Returns rows [..., M] of a matrix [V, M], or of its packed form."""
  if isinstance(weight, Quantized):
    rows = jax.tree.map(lambda x: look_up(x, tokens), weight)
    return quantization.dequantize(rows)
  if weight.ndim == 2:
    return weight[tokens]
  block = weight.shape[2]
  if block == _HALF and weight.dtype in _NIBBLES.values():
    low, high = _halves(weight[tokens // (2 * block), :, tokens % block])
    return jnp.where((tokens % (2 * block) < block)[..., None], low, high)
  return weight[tokens // block, :, tokens % block]
