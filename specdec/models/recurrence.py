"""Layers with a recurrent state, for drafts as for single tokens.

Gated delta rule (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060) are both

  S_n = a_n S_p + k_n u_n^T,   y_n = q_n^T S_n,   p the token before n,

with u_n = v_n in Mamba-2 and u_n = b_n (v_n - a_n S_p^T k_n) in the delta rule.
Unrolled along the path of a node, with A_n the product of the a on it,

  S_n = A_n S_0 + sum over m on the path of (A_n / A_m) k_m u_m^T:

attention without a softmax, over a few slots and a state. So nothing is undone
and no state is kept for a node: (k, u, log a) of a token lie in a slot as keys
and values do, a node sees its ancestors' slots, and commit moves a length. What
u_n needs of other new nodes is a triangular system. Slots enter the state in
`make_room`, once there are many, and stay long enough for a draft to be rolled
back. Invariant: the length never drops below `folded`, except to 0, which
restarts the row.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec.models.attention import View
from specdec.models.attention import view as view_of
from specdec.models.parts import Recurrence
from specdec.types import Array, RecurrentState

LOOP = "recurrent_folds"  # name of the loop of `make_room` in compiled programs
# A state gathers the roundings of a whole text.
_einsum = functools.partial(jnp.einsum, precision="highest")


def init(recurrence: Recurrence, batch: int, dtype) -> RecurrentState:
  """Returns what a layer keeps before any token.

  Args:
    dtype: of the inputs of the convolution.
  """
  r, slots = recurrence, recurrence.num_slots

  def zeros(heads, size, dim, dtype=jnp.float32):
    return jnp.zeros((batch, heads, size, dim), dtype)

  key, value = (r.num_key_heads, r.key_dim), (r.num_heads, r.value_dim)
  return RecurrentState(
    zeros(r.num_heads, r.value_dim, r.key_dim),
    tuple(
      zeros(heads, r.num_before + slots, dim, dtype)
      for heads, dim in (key, key, value)
    ),
    zeros(r.num_key_heads, slots, r.key_dim),
    zeros(r.num_heads, slots, r.value_dim),
    jnp.zeros((batch, r.num_heads, slots), jnp.float32),
    jnp.zeros((batch,), jnp.int32),
  )


def inputs(
  layer: RecurrentState | None,
  new: tuple[Array, ...],
  view: View,
  recurrence: Recurrence,
) -> tuple[tuple[Array, ...], RecurrentState | None]:
  """Returns what a causal convolution of each node sees, its ancestors.

  Args:
    layer: with room for the nodes; None: there is nothing before them.
    new: [B, heads, T, dim] each.

  Returns:
    [B, heads, K, T, dim] each, the oldest first, the node itself last; and the
    layer for `run`: with the new inputs, or all committed positions in the
    state where there is no room for so many tokens.

  Raises:
    ValueError: there is no room for so many nodes of a tree, or they attend to
      others than their ancestors.
  """
  kernel = recurrence.kernel
  is_text = view.ancestors is None and not view.first
  size = view.depth.shape[1]
  if view.mask is not None or (layer is None and not is_text):
    raise ValueError("a recurrent layer is trained on whole texts alone")
  if layer is None:
    past = ((0, 0), (0, 0), (kernel - 1, 0), (0, 0))
    return tuple(_windows(jnp.pad(x, past), kernel) for x in new), None
  if size > recurrence.num_nodes:
    if not is_text:
      raise ValueError(
        f"a tree of {size} nodes, and recurrent layers keep slots for "
        f"{recurrence.num_nodes}: take a smaller draft, or a larger "
        "num_nodes"
      )
    layer = _emptied(layer, view.length, recurrence)
    parts = (
      jnp.concatenate([x, y.astype(x.dtype)], axis=2)
      for x, y in zip(layer.inputs, new)
    )
    return tuple(_windows(x, kernel) for x in parts), layer
  start = view.length - layer.folded + recurrence.num_before
  num_read = kernel - 1 + view.first
  recent = [kv.read(x, start - kernel + 1, num_read) for x in layer.inputs]
  # All is read before slots are written, so that they are in place.
  recent, old = jax.lax.optimization_barrier((recent, layer.inputs))
  seen = (
    _before(jnp.concatenate([x, y.astype(x.dtype)], axis=2), view, kernel)
    for x, y in zip(recent, new)
  )
  start += view.first
  written = (kv.write(x, y, start) for x, y in zip(old, new))
  return tuple(seen), layer.replace(inputs=tuple(written))


def _emptied(
  layer: RecurrentState, length: Array, recurrence: Recurrence
) -> RecurrentState:
  """Returns the state after all committed positions, and the last inputs."""
  used = length - layer.folded
  begins = (used < 0)[:, None, None, None]
  num_last = recurrence.kernel - 1
  start = used + recurrence.num_before - num_last
  last = (kv.read(x, start, num_last) for x in layer.inputs)
  return layer.replace(
    state=jnp.where(begins, 0, _state_after_first(layer, used)),
    inputs=tuple(jnp.where(begins, 0, x) for x in last),
  )


def _state_after_first(layer: RecurrentState, count: Array) -> Array:
  """Returns the state of each row after its first count[b] slots."""
  taken = (jnp.arange(layer.decays.shape[-1])[None] < count[:, None])[:, None]
  values = jnp.where(taken[..., None], layer.values, 0)
  decays = jnp.where(taken, layer.decays, 0)
  return _state_after(layer.state, layer.keys, values, decays)


def _state_after(
  state: Array, keys: Array, values: Array, decays: Array
) -> Array:
  """Returns the state after the positions of some slots, in order."""
  after, all_of_it = _kept(decays)
  new = after[..., None] * values
  return all_of_it[..., None] * state + _einsum(
    "bhwv,bhwk->bhvk", new, _spread(keys, values.shape[1])
  )


def _kept(decays: Array) -> tuple[Array, Array]:
  """Returns what is left at the end of what each of W positions [..., W] adds,
  and of the state before all [..., 1].

  By sums of logarithms, not differences of sums, which would cancel.
  """
  total = jax.lax.cumsum(decays, axis=decays.ndim - 1, reverse=True)
  after = jnp.concatenate(
    [total[..., 1:], jnp.zeros_like(total[..., :1])], axis=-1
  )
  return jnp.exp(after), jnp.exp(total[..., :1])


def make_room(
  layers: Sequence[RecurrentState],
  length: Array,
  size: int,
  recurrence: Recurrence,
) -> list[RecurrentState]:
  """Returns layers with room for `size` nodes after the committed positions.

  Rows that have none are folded, one at a time and in all layers at once, for
  rows fill their slots at a pace of their own.

  Args:
    length: [B] committed positions.
  """

  def needs(layers):
    used = (length - layer.folded for layer in layers)
    no_room = ((x < 0) | (x + size > recurrence.capacity) for x in used)
    return functools.reduce(jnp.logical_or, no_room)  # [B]

  def turn(_, layers):
    row = jnp.argmax(needs(layers))
    return [_fold(_pinned(x), length[row], row, recurrence) for x in layers]

  with jax.named_scope(LOOP):
    turns = jnp.sum(needs(layers))
    layers = jax.lax.fori_loop(0, turns, turn, [*map(_pinned, layers)])
  return [*map(_pinned, layers)]


def _pinned(layer: RecurrentState) -> RecurrentState:
  """A layer's buffers, each in its one layout (cache.pinned)."""
  return jax.tree.map(kv.pinned, layer)


def _fold(
  layer: RecurrentState, length: Array, row: Array, recurrence: Recurrence
) -> RecurrentState:
  """Moves slots of a row into its state, but for the last num_nodes: so far may
  a drafter go back. A row of another text begins anew.

  Args:
    length: [] committed positions of the row.
    row: [].
  """
  stay, most = recurrence.num_nodes, recurrence.slack
  own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), layer)
  used = length - own.folded  # [1]
  begins, count = used[0] < 0, jnp.maximum(used - stay, 0)
  state = _state_after_first(
    own.replace(
      keys=own.keys[:, :, :most],
      values=own.values[:, :, :most],
      decays=own.decays[:, :, :most],
    ),
    count,
  )

  def moved(x, before=0):
    """What stays, and nodes that ran before these, in front."""
    more = jnp.pad(x, ((0, 0), (0, 0), (0, stay), (0, 0)))
    return kv.read(more, count, before + 2 * stay)

  new = RecurrentState(
    state,
    tuple(moved(x, recurrence.num_before) for x in own.inputs),
    moved(own.keys),
    moved(own.values),
    moved(own.decays[..., None])[..., 0],
    own.folded + count,
  )
  # All is read before slots are written, so that they are in place.
  new = jax.lax.optimization_barrier(
    jax.tree.map(lambda x: jnp.where(begins, 0, x), new)
  )
  return jax.tree.map(
    lambda x, new: jax.lax.dynamic_update_slice(
      x, new, (row, *[0] * (x.ndim - 1))
    ),
    layer,
    new,
  )


def _before(recent: Array, view: View, kernel: int) -> Array:
  """Returns `inputs` of recent ones [B, heads, K - 1 + N, dim], of the last
  committed positions and of all nodes of the tree so far."""
  first, depth = view.first, view.depth  # [1 or B, N]
  if view.ancestors is None:
    return _windows(recent[:, :, first:], kernel)
  seen = []
  for up in reversed(range(kernel)):
    goal = depth[:, first:] - up  # of the ancestor; below 0 it is committed
    is_it = view.ancestors[:, first:] & (depth[:, None] == goal[..., None])
    node = jnp.where(goal < 0, goal, jnp.argmax(is_it, axis=-1))  # [1 or B, T]
    index = jnp.broadcast_to(kernel - 1 + node, (len(recent), node.shape[1]))
    seen.append(jnp.take_along_axis(recent, index[:, None, :, None], axis=2))
  return jnp.stack(seen, axis=2)


def _windows(x: Array, kernel: int) -> Array:
  """Returns parts [B, heads, K, T, dim] of x [B, heads, K - 1 + T, dim]."""
  size = x.shape[2] - kernel + 1
  return jnp.stack([x[:, :, j : j + size] for j in range(kernel)], axis=2)


def convolve(seen: Array, kernel: Array, bias: Array | None) -> Array:
  """Convolves channels one by one, then SiLU: [B, T, heads, dim] float32.

  Args:
    seen: [B, heads, K, T, dim], of `inputs`.
    kernel: [heads * dim, K].
    bias: [heads * dim], or None.
  """
  heads, dim = seen.shape[1], seen.shape[-1]
  kernel = kernel.astype(jnp.float32).reshape(heads, dim, -1)
  y = jnp.einsum("bhjtd,hdj->bthd", seen.astype(jnp.float32), kernel)
  if bias is not None:
    y += bias.astype(jnp.float32).reshape(1, 1, heads, dim)
  return jax.nn.silu(y)


def unit(x: Array) -> Array:
  """Divides vectors by their length."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


class Nodes(NamedTuple):
  """What the recurrence is given of T tokens, float32."""

  query: Array  # [B, T, key heads, key dim]
  key: Array  # [B, T, key heads, key dim]
  value: Array  # [B, T, heads, value dim]
  decay: Array  # [B, T, heads] logarithm of what multiplies the state, <= 0
  rate: Array | None  # [B, T, heads], b of the delta rule; None: Mamba-2


def run(
  layer: RecurrentState | None,
  nodes: Nodes,
  view: View,
  recurrence: Recurrence,
) -> tuple[Array, RecurrentState | None]:
  """Runs nodes after the committed positions, and writes them to their slots.

  Args:
    layer: of `inputs`, or None.
    view: of the nodes, its length that of the committed positions.

  Returns:
    y [B, T, heads, value dim]; and the layer, None if it keeps none of them.
  """
  (batch, length), size = nodes.value.shape[:2], recurrence.num_nodes
  if layer is not None and length <= size:
    return _over_slots(layer, nodes, view)
  num_parts = -(-length // size)

  def in_parts(x):  # [parts, B, size, ...]
    rest = ((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, ((0, 0), (0, num_parts * size - length), *rest))
    return x.reshape(batch, num_parts, size, *x.shape[2:]).swapaxes(0, 1)

  def zeros(heads, *rest):
    return jnp.zeros((batch, heads, *rest), jnp.float32)

  key_heads, key_dim = nodes.key.shape[2:]
  heads, dim = nodes.value.shape[2:]
  start = RecurrentState(
    zeros(heads, dim, key_dim) if layer is None else layer.state,
    (),
    zeros(key_heads, size, key_dim),
    zeros(heads, size, dim),
    zeros(heads, size),
    jnp.zeros((batch,), jnp.int32),
  )

  def step(layer, nodes):
    y, layer = _over_slots(layer, nodes, view_of(layer.folded, None, 0, size))
    slots = layer.keys, layer.values, layer.decays
    return layer.replace(state=_state_after(layer.state, *slots)), y

  _, y = jax.lax.scan(step, start, jax.tree.map(in_parts, nodes))
  y = y.swapaxes(0, 1).reshape(batch, -1, heads, dim)
  return y[:, :length], None


def _over_slots(
  layer: RecurrentState, nodes: Nodes, view: View
) -> tuple[Array, RecurrentState]:
  """Runs nodes as `run` does, in one system of equations.

  Slots are read as they were, and new nodes apart from them: so slots stay
  where they are, and what is new alone is written.
  """
  query, key, value, decay, rate = nodes
  num_tokens, num_heads = value.shape[1:3]
  view = view._replace(length=view.length - layer.folded, window=None)
  key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
  decays = kv.write(
    layer.decays[..., None], decay.swapaxes(1, 2)[..., None], view.slot
  )[..., 0]

  column = jnp.arange(layer.decays.shape[-1])
  mask = view.mask_of(column)[:, None]  # [B, 1, T, W], the node itself too
  on_path = jnp.where(mask, decays[:, :, None], 0)
  after, from_state = _kept(on_path)  # [B, heads, T, W] and [B, heads, T, 1]
  after = jnp.where(mask, after, 0)
  place = column[None] - view.slot[:, None]  # [B, W]
  is_new = ((place >= 0) & (place < num_tokens))[:, None, None]
  from_slots = jnp.where(is_new, 0, after)
  index = view.slot[:, None] + jnp.arange(num_tokens)[None]
  among = jnp.take_along_axis(after, index[:, None, None], axis=3)

  # [B, heads, T or 2 T, key dim]: one product reads the state for both.
  pair = [query.swapaxes(1, 2), key][: 1 if rate is None else 2]
  pair = _spread(jnp.concatenate(pair, axis=2), num_heads)
  past = _einsum("bhtk,bhvk->bhtv", pair, layer.state)
  scores = _einsum("bhtk,bhwk->bhtw", pair, _spread(layer.keys, num_heads))
  own_scores = _einsum("bhtk,bhnk->bhtn", pair, _spread(key, num_heads))

  def read(part):
    """What queries or keys of `pair` read of state and slots."""
    weight = from_slots * scores[:, :, part]
    y = _einsum("bhtw,bhwv->bhtv", weight, layer.values)
    return from_state * past[:, :, part] + y

  queries, keys = slice(num_tokens), slice(num_tokens, None)
  if rate is not None:
    rate = rate.swapaxes(1, 2)[..., None]
    value = rate * (value - read(keys))
    if num_tokens > 1:
      value = _solve(rate * among * own_scores[:, :, keys], value)
  y = read(queries)
  y += _einsum("bhtn,bhnv->bhtv", among * own_scores[:, :, queries], value)
  # All is read before slots are written, so that they are in place.
  y, old = jax.lax.optimization_barrier((y, (layer.keys, layer.values)))
  layer = layer.replace(
    keys=kv.write(old[0], key, view.slot),
    values=kv.write(old[1], value, view.slot),
    decays=decays,
  )
  # The next call may write in place, since all was read.
  return jax.lax.optimization_barrier((y.swapaxes(1, 2), layer))


def _solve(among: Array, value: Array) -> Array:
  """Solves (1 + L) u = value [..., T, D], L below the diagonal of [..., T, T].

  Nodes stand after their ancestors, so that what is not below is 0.
  """
  return jax.lax.linalg.triangular_solve(
    among, value, left_side=True, lower=True, unit_diagonal=True
  )


def _spread(x: Array, num_heads: int) -> Array:
  """Repeats key heads [B, key heads, ...] for the heads that share them."""
  return jnp.repeat(x, num_heads // x.shape[1], axis=1)
