"""The KV cache: write past the end, commit by moving the length; prefill.

There is no rollback: refused tokens lie in slots at or past `length` and are
overwritten. Invariant: S >= committed length + tokens of one call (at least
2), or a write would clamp onto committed KV.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from specdec.types import (
  Int8Slots,
  KVCache,
  Model,
  ModelOutput,
  PyTree,
  RecurrentState,
  Source,
)

CHUNK = 128  # tokens of one pass over a prompt
_LANES = 128  # of a TPU's tile
_COLUMNS = Layout(major_to_minor=(0, 1, 3, 2))
_TILE = 16  # slots; other counts get another layout at a TPU program's entry
_MOVED = 16 * _TILE, _TILE  # slots that `in_blocks` takes at once
_MANY = 64  # rows; of more, an operation for each makes too long a program


def num_slots(positions: int) -> int:
  """S for a cache of at least so many positions, scratch included."""
  return -(-positions // _TILE) * _TILE


def init(
  batch: int,
  slots: int,
  num_layers: int,
  num_heads: int,
  dims: tuple[int, int],
  dtype,
) -> KVCache:
  """An empty cache: per layer k and v of [B, heads, S, dim], dims of each.

  Args:
    dtype: of keys and values; int8: Int8Slots.
  """

  def empty(dim: int) -> jax.Array | Int8Slots:
    values = jnp.zeros((batch, num_heads, slots, dim), dtype)
    if values.dtype != jnp.int8:
      return values
    return Int8Slots(values, jnp.zeros((*values.shape[:3], 1), jnp.float32))

  layers = tuple(tuple(map(empty, dims)) for _ in range(num_layers))
  return KVCache(layers=layers, length=jnp.zeros((batch,), jnp.int32))


def check_tokens(model: Model, tokens: int, name: str) -> None:
  """Refuses calls of more tokens than a model's recurrent layers keep.

  Args:
    tokens: of a call of which any may be committed.
    name: of the model, for the error.

  Raises:
    ValueError: says how many they keep.
  """
  most = model.max_tokens
  if most is not None and tokens > most:
    raise ValueError(
      f"the recurrent layers of {name} keep slots for {most} tokens of a call, "
      f"and this draft needs {tokens}: take a smaller one, or a larger "
      "num_nodes"
    )


def empty(
  model: Model,
  params: PyTree,
  batch: int,
  slots: int,
  source: Source | None = None,
) -> KVCache:
  """An empty cache, which of an encoder-decoder holds the encoded source.

  Args:
    source: what the encoder reads; a decoder alone does not look at it.

  Raises:
    ValueError: an encoder-decoder without a source.
  """
  cache = model.init_cache(batch, slots)
  if model.encode is None:
    return cache
  if source is None:
    raise ValueError("an encoder-decoder has no source to encode")
  return cache.replace(cross=model.encode(params, source))


def round_to_int8(x: jax.Array) -> Int8Slots:
  """Rounds keys or values [B, heads, T, dim] to eight bits.

  Returns:
    Each divided by its scale, its largest magnitude over 127; of zeros 1. What
    is not finite has such a scale, and stays so.
  """
  x = x.astype(jnp.float32)
  most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  scale = jnp.where(most == 0, 1.0, most / 127)
  return Int8Slots(jnp.round(x / scale).astype(jnp.int8), scale)


def write(
  buffer: jax.Array | Int8Slots, new: jax.Array, slot: jax.Array
) -> jax.Array | Int8Slots:
  """Writes new [B, heads, T, dim] into slots slot[b] .. slot[b] + T - 1.

  The result has the cache's one layout. On a mesh every device calls it for its
  own part (sharding.Placement.on_each): a partitioner would gather.
  """
  if isinstance(buffer, Int8Slots):
    return jax.tree.map(
      lambda buffer, new: write(buffer, new, slot), buffer, round_to_int8(new)
    )
  new = new.astype(buffer.dtype)
  if buffer.shape[0] == 1:  # one slice update, where XLA sees one
    written = jax.lax.dynamic_update_slice(buffer, new, _corner(0, slot[0]))
  else:
    written = _by_platform(_write_by_rows, _write_all_rows, buffer, new, slot)
  return pinned(written)


def _by_platform(one_by_one, at_once, buffer, *rest):
  """Runs an operation row by row on a TPU, unless there are too many rows, and
  for all of them at once elsewhere."""
  if buffer.shape[0] > _MANY:
    return at_once(buffer, *rest)
  return jax.lax.platform_dependent(
    buffer, *rest, tpu=one_by_one, default=at_once
  )


def _corner(row, slot):
  """Returns where a row's slot begins, in one dtype: where 64 bits are allowed
  a Python integer has them, and a slot need not."""
  return tuple(jnp.asarray(i, slot.dtype) for i in (row, 0, slot, 0))


def _write_all_rows(buffer, new, slot):
  return jax.vmap(
    lambda b, n, s: jax.lax.dynamic_update_slice(b, n, _corner(0, s)[1:])
  )(buffer, new, slot)


@jax.jit  # traced once for all layers
def _write_by_rows(buffer, new, slot):
  """On a TPU the scatter that vmap makes of it becomes a loop that carries the
  buffer into on-chip memory and back: all of it is written, every pass."""
  for row in range(buffer.shape[0]):
    buffer = jax.lax.dynamic_update_slice(
      buffer, new[row : row + 1], _corner(row, slot[row])
    )
  return buffer


def read(buffer: jax.Array, slot: jax.Array, size: int) -> jax.Array:
  """Returns slots slot[b] .. slot[b] + size - 1: [B, heads, size, dim]."""
  ways = (
    functools.partial(f, size=size) for f in (_read_by_rows, _read_all_rows)
  )
  return _by_platform(*ways, buffer, slot)


def _read_all_rows(buffer, slot, size):
  return jax.vmap(
    lambda b, s: jax.lax.dynamic_slice_in_dim(b, s, size, axis=1)
  )(buffer, slot)


@functools.partial(jax.jit, static_argnames="size")
def _read_by_rows(buffer, slot, size):
  """On a TPU a gather over slots wants them outermost, and copies the cache."""
  return jnp.concatenate(
    [
      jax.lax.dynamic_slice(
        buffer,
        _corner(row, slot[row]),
        (1, buffer.shape[1], size, buffer.shape[3]),
      )
      for row in range(buffer.shape[0])
    ]
  )


def pinned(buffer: jax.Array) -> jax.Array:
  """Keeps K or V [B, heads, S, dim], or another buffer, in its one layout.

  Where passes of unlike width choose their own, a TPU copies the cache from one
  to the other every round. Heads narrower than its tile would be padded to it:
  there slots are innermost.
  """

  def in_rows(buffer):
    return with_layout_constraint(buffer, Layout(tuple(range(buffer.ndim))))

  if buffer.ndim != 4 or buffer.shape[-1] % _LANES == 0:
    return in_rows(buffer)
  return jax.lax.platform_dependent(
    buffer,
    tpu=lambda buffer: with_layout_constraint(buffer, _COLUMNS),
    default=in_rows,
  )


def commit(
  cache: KVCache, path: jax.Array, num_committed: jax.Array, chain: bool
) -> KVCache:
  """Keeps the accepted path of a draft whose nodes were just written.

  Args:
    cache: node n of row b in slot length[b] + n.
    path: [B, D+1] accepted nodes in order, root first; entries past the
      accepted ones are ignored.
    num_committed: [B] positions to keep.
    chain: the path is 0, 1, 2 ...: nothing has to move.

  Returns:
    The cache, longer by num_committed; only D + 1 slots a row were moved.
  """
  layers = cache.layers
  if not chain:
    source = cache.length[:, None] + path  # [B, D+1]

    def move(buffer):
      return write(buffer, _gather(buffer, source), cache.length)

    layers = tuple(
      _commit_recurrent(layer, cache.length, path)
      if isinstance(layer, RecurrentState)
      else jax.tree.map(move, layer)
      for layer in layers
    )
  return cache.replace(layers=layers, length=cache.length + num_committed)


def lengthened(cache: KVCache, by: jax.Array) -> KVCache:
  """Adds `by` [B] committed positions that hold nothing: recurrent layers have
  them in their states."""
  layers = tuple(
    layer.replace(folded=layer.folded + by)
    if isinstance(layer, RecurrentState)
    else layer
    for layer in cache.layers
  )
  return cache.replace(layers=layers, length=cache.length + by)


def _commit_recurrent(
  layer: RecurrentState, length: jax.Array, path: jax.Array
) -> RecurrentState:
  """Moves the path to the slots after the committed positions."""
  used = length - layer.folded

  def move(x, offset=0):
    source = offset + used[:, None] + path
    return write(x, _gather(x, source), used + offset)

  before = layer.inputs[0].shape[2] - layer.keys.shape[2]
  return layer.replace(
    inputs=tuple(move(x, before) for x in layer.inputs),
    keys=move(layer.keys),
    values=move(layer.values),
    decays=move(layer.decays[..., None])[..., 0],
  )


def _gather(buffer, source):
  """Returns slots source [B, T] of a buffer: [B, heads, T, dim]."""
  return _by_platform(_gather_one_by_one, _gather_all, buffer, source)


def _gather_all(buffer, source):
  return jnp.take_along_axis(buffer, source[:, None, :, None], axis=2)


@jax.jit
def _gather_one_by_one(buffer, source):
  """On a TPU a gather over slots wants them outermost, and copies the cache."""
  size = (1, buffer.shape[1], 1, buffer.shape[3])
  return jnp.concatenate(
    [
      jnp.concatenate(
        [
          jax.lax.dynamic_slice(buffer, _corner(row, source[row, i]), size)
          for i in range(source.shape[1])
        ],
        axis=2,
      )
      for row in range(buffer.shape[0])
    ]
  )


def in_blocks(
  change: Callable[..., PyTree],
  buffers: PyTree,
  axis: int,
  first: jax.Array,
  used: jax.Array,
  *others: jax.Array,
) -> tuple[PyTree, jax.Array]:
  """Replaces slots first .. used - 1 of buffers in place, a block at a time.

  It costs what is in use, not what the buffers have room for. Blocks are large
  and at the end small, which may reach a little beyond both ends.

  Args:
    change: takes the same slots of all buffers and others, and returns those of
      the buffers; they depend on no other slots.
    buffers: of as many slots each.
    axis: of the slots, counted from the end: buffers differ in rank.
    first, used: [].
    others: buffers that are read alone.

  Returns:
    The buffers, and the end of the last block, [], known when all is written: a
    call that changes `others` in place takes it as `used`, and no copy of them
    is made.
  """

  slots = jax.tree.leaves(buffers)[0].shape[axis]

  def replace(size: int, slot: jax.Array, buffers: PyTree) -> PyTree:
    size = min(size, slots)
    start = jnp.minimum(slot, slots - size)  # of the last block, before `slot`

    def part(x):
      return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    def put(x, old, new):
      if slots % _TILE:
        number = jax.lax.broadcasted_iota(jnp.int32, new.shape, new.ndim + axis)
        new = jnp.where(start + number >= slot, new, old)
      return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis)

    old = jax.tree.map(part, buffers)
    return jax.tree.map(put, buffers, old, change(old, *map(part, others)))

  used = jnp.minimum(used, slots)
  carry = first // _TILE * _TILE, buffers
  for size in _MOVED:
    least = size if size > _TILE else 1  # slots left that are worth a block
    carry = jax.lax.while_loop(
      lambda carry, least=least: carry[0] + least <= used,
      lambda carry, size=size: (carry[0] + size, replace(size, *carry)),
      carry,
    )
  return carry[1], carry[0]


def permute(
  cache: KVCache, rows: jax.Array, first: jax.Array, used: jax.Array
) -> KVCache:
  """Moves row rows[r] to row r, in blocks of slots up to the last in use.

  The cross-attention of rows that change places must be the same.

  Args:
    rows: [B].
    first: [] slots before it are the same in rows that change places.
    used: [] slots that hold anything, the largest number over rows.
  """

  def move(parts):
    return jax.tree.map(lambda x: x[rows], parts)

  in_slots = tuple(x for x in cache.layers if not isinstance(x, RecurrentState))
  if in_slots:
    in_slots, _ = in_blocks(move, in_slots, -2, first, used)
  rest = iter(in_slots)
  layers = tuple(
    move(x) if isinstance(x, RecurrentState) else next(rest)
    for x in cache.layers
  )
  return cache.replace(layers=layers, length=cache.length[rows])


def prefill(
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
    chunk: tokens of one pass, if the model takes so many.
    features: None, or the layers whose entering streams are collected.

  Returns:
    The cache, and (features given) a ModelOutput over [B, L], zero where no
    token was run; logits None. Only positions a row ran are written.
  """
  batch, size = tokens.shape
  chunk = min(chunk, model.max_tokens or chunk)
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
