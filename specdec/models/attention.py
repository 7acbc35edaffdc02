"""Attention of draft nodes over KV cache slots, and what they may see.

Slots below `length` are committed; slot length + j holds node j of the call.
Invariant: a sliding window is measured in positions (length + depth), not in
slots, so drafted nodes never push committed text out of it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import draft_tree, sharding
from specdec.models import cpu_kernels
from specdec.models.products import einsum_float32
from specdec.types import Int8Slots, Sparse

BLOCK = 512  # slots that are read at once from a longer cache
LOOP = "cache_blocks"  # name of the loop over them in compiled programs


class View(NamedTuple):
  """What the nodes of a call attend to: committed text and their ancestors.

  Attributes:
    length: [B] committed positions.
    first: the call runs nodes first .. N - 1, T of them.
    depth: [1 or B, N] of every node.
    ancestors: [1 or B, N, N] bool, whether node n attends to node m; None for a
      chain.
    window: positions of the sliding window, a node's included; None for all.
    chunk: a node sees its chunk alone, which begins at a multiple of this;
      None: all chunks.
    sinks: first positions, at most BLOCK, that are seen outside of the window.
    mask: [B, T, S] bool, which replaces all of that; reverse-mode derivatives
      need one.
    lags: of a mask. Behind its slots come T more for each lag, of which token t
      attends to number t - lag, if there is one.
    bias: [2 R + 1, heads] float32, added to the scores by how far the slot lies
      before the node in positions, from -R to R; farther ones as these two.
      None: none.
  """

  length: jax.Array
  first: int
  depth: jax.Array
  ancestors: jax.Array | None
  window: int | None = None
  mask: jax.Array | None = None
  lags: tuple[int, ...] = ()
  bias: jax.Array | None = None
  sinks: int = 0
  chunk: int | None = None

  @property
  def slot(self) -> jax.Array:
    """The slots [B] that the call's first nodes are written to."""
    return self.length + self.first

  @property
  def positions(self) -> jax.Array:
    """Absolute positions of the nodes, length + depth: [B, T]."""
    return self.length[:, None] + self.depth[:, self.first :]

  def _nodes_of(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns slots [C] relative to `length`, and the nodes there: [B, C]."""
    relative = slots[None] - self.length[:, None]
    return relative, jnp.clip(relative, 0, self.depth.shape[1] - 1)

  def distance(self, slots: jax.Array) -> jax.Array:
    """Returns [B, T, C]: how far slots [C] lie before a node, in positions.

    Meaningless for slots that no node attends to.
    """
    relative, node = self._nodes_of(slots)
    if self.ancestors is not None:
      depth = jnp.broadcast_to(
        self.depth, (len(self.length), self.depth.shape[1])
      )
      depth = jnp.take_along_axis(depth, node, axis=1)
      relative = jnp.where(relative < 0, relative, depth)
    return self.depth[:, self.first :, None] - relative[:, None]

  def mask_of(self, slots: jax.Array) -> jax.Array:
    """Returns [B, T, C] bool: whether a node attends to slots [C]."""
    relative, node = self._nodes_of(slots)
    if self.ancestors is None:
      mask = relative[:, None] <= self.depth[:, self.first :, None]
    else:
      batch, nodes = len(self.length), self.depth.shape[1]
      ancestors = jnp.broadcast_to(
        self.ancestors[:, self.first :], (batch, nodes - self.first, nodes)
      )
      is_ancestor = jnp.take_along_axis(ancestors, node[:, None], axis=2)
      mask = (relative < 0)[:, None]
      mask |= is_ancestor & (relative < nodes)[:, None]
    if self.window is not None:
      is_near = self.distance(slots) < self.window
      mask &= is_near | (slots < self.sinks)[None, None]
    if self.chunk is not None:
      in_chunk = self.positions[:, :, None] % self.chunk
      mask &= self.distance(slots) <= in_chunk
    return mask

  def bias_of(self, slots: jax.Array) -> jax.Array:
    """Returns [B, heads, T, C]: what is added to the scores of slots [C]."""
    reach = len(self.bias) // 2
    index = jnp.clip(self.distance(slots), -reach, reach) + reach
    return jnp.moveaxis(self.bias[index], -1, 1)

  def masked(self, num_slots: int) -> "View":
    """Returns this view with its mask over slots 0 .. num_slots - 1."""
    return self._replace(mask=self.mask_of(jnp.arange(num_slots)))

  def sparse(self, positions: Sparse) -> "View":
    """Returns this view, of these positions alone."""
    if self.window is None and self.chunk is None:
      return self._replace(window=positions.window, sinks=positions.sinks)
    window = min(self.window or positions.window, positions.window)
    return self._replace(window=window)

  def blocks(self, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Returns (first, stop) of the blocks of slots that any row attends to, its
    sinks left out."""
    used = jnp.minimum(self.length.max() + self.depth.shape[1], num_slots)
    first = jnp.zeros_like(used)
    least = self.length.min()
    if self.window is not None:
      first = jnp.maximum(least + 1 - self.window, 0)
    if self.chunk is not None:
      first = jnp.maximum(first, least // self.chunk * self.chunk)
    return first // BLOCK, -(-used // BLOCK)


def view(
  length: jax.Array,
  parents: jax.Array | None,
  first: int,
  num_tokens: int,
  window: int | None = None,
) -> View:
  """Returns what nodes first .. first + num_tokens - 1 attend to.

  Args:
    length: [B] committed positions.
    parents: of all nodes so far, [N] or [B, N]; None for a chain.
    window: positions of the sliding window, the node's included.
  """
  chain = draft_tree.chain(first + num_tokens)
  tree = chain if parents is None else parents
  ancestors = None
  if parents is not None:
    ancestors = jnp.asarray(draft_tree.ancestors(tree))
    ancestors = ancestors.reshape(-1, *ancestors.shape[-2:])
  depth = jnp.atleast_2d(draft_tree.depth(tree))
  return View(length, first, depth, ancestors, window)


def source_view(length: jax.Array, num_tokens: int) -> View:
  """Returns what attends to all of a source: its first `length` [B] slots."""
  nobody = np.zeros((1, num_tokens, num_tokens), bool)
  depth = jnp.zeros((1, num_tokens), jnp.int32)
  return View(length, 0, depth, nobody)


def write_kv(
  layer: tuple | None,
  keys: jax.Array,
  values: jax.Array,
  view: View,
  place: sharding.Placement,
) -> tuple[jax.Array | Int8Slots, jax.Array | Int8Slots, View]:
  """Writes a call's keys and values into the cache, if there is one.

  Args:
    layer: (k, v) of the cache; None: the tokens attend to each other alone.
    keys, values: of the call, [B, KV heads, T, D] each.
    place: where the cache lies.

  Returns:
    Keys, values and the view with which to `attend`.
  """
  if layer is None:
    is_masked = view.mask is not None
    return keys, values, view if is_masked else view.masked(keys.shape[2])
  axes = sharding.CACHE, sharding.CACHE, ("rows",)
  write = place.on_each(kv.write, axes, sharding.CACHE)
  written = (write(x, new, view.slot) for x, new in zip(layer, (keys, values)))
  return *written, view


def attend(
  query: jax.Array,
  keys: jax.Array | Int8Slots,
  values: jax.Array | Int8Slots,
  view: View,
  *,
  scale: float,
  cap: float | None = None,
  sink_logits: jax.Array | None = None,
  value_query: jax.Array | None = None,
  on_mesh: bool = False,
) -> jax.Array:
  """Computes grouped-query attention over the slots of a cache in use.

  On a single CPU a C++ kernel computes it, if one could be built
  (models/cpu_kernels.py). Elsewhere a cache of more than BLOCK slots is read in
  blocks, up to the longest text of the batch and from the shortest one's window
  on, with a running maximum and sum (arXiv:2205.14135). What a row does not see
  changes no bit of its result.

  Args:
    query: [B, T, heads, D].
    keys: [B, KV heads, S, D], or Int8Slots of as many.
    values: [B, KV heads, S, E], as keys.
    scale: multiplies the scores.
    cap: bounds the scores to cap * tanh(score / cap).
    sink_logits: [heads], each another term of its head's softmax, without a
      value.
    value_query: [B, T, heads, E], whose products with the values are added to
      the scores: a value is part of its key.
    on_mesh: the arrays are divided over devices.

  Returns:
    [B, T, heads * E].
  """
  by_kernel = view.mask is None and not on_mesh and value_query is None
  if by_kernel and cpu_kernels.attends(query, _numbers_and_scale(keys)[0]):
    ancestors = view.ancestors
    if ancestors is None:
      ancestors = np.tri(view.depth.shape[1], dtype=bool)[None]
    y = jax.lax.platform_dependent(
      query,
      keys,
      values,
      jnp.asarray(view.length, jnp.int32),
      ancestors,
      jnp.asarray(view.depth, jnp.int32),
      view.bias,
      sink_logits,
      cpu=functools.partial(
        cpu_kernels.attend,
        first=view.first,
        window=view.window,
        sinks=view.sinks,
        chunk=view.chunk,
        scale=scale,
        cap=cap,
      ),
      default=lambda q, k, v, *rest: _by_xla(
        q, k, v, view, scale, cap, rest[-1]
      ),
    )
  else:
    y = _by_xla(query, keys, values, view, scale, cap, sink_logits, value_query)
  return y.reshape(*query.shape[:2], -1).astype(query.dtype)


@dataclasses.dataclass(frozen=True)
class _Queries:
  """The queries of a call by KV head, and how they score slots.

  Attributes:
    query: [B, KV heads, groups * T, D].
    value_query: [B, KV heads, groups * T, E], or None.
    num_tokens: T.
    view, scale, cap: of `attend`.
  """

  query: jax.Array
  value_query: jax.Array | None
  num_tokens: int
  view: View
  scale: float
  cap: float | None

  def scores(self, keys, values, mask, slots) -> jax.Array:
    """Returns [B, KV heads, groups * T, C] of slots [C].

    Args:
      keys, values: of these slots.
      mask: [B, T, C] bool, what each token sees.
    """
    x = _products(keys, self.query)
    if self.value_query is not None:
      x += _products(values, self.value_query)
    shape = x.shape
    x = softcap(self.scale * x, self.cap)
    x = x.reshape(*shape[:2], -1, self.num_tokens, len(slots))
    if self.view.bias is not None:
      bias = self.view.bias_of(slots)
      x += bias.reshape(bias.shape[0], *x.shape[1:])
    return jnp.where(mask[:, None, None], x, -jnp.inf).reshape(shape)

  def weighted(self, weights: jax.Array, values) -> jax.Array:
    """Returns the sums [B, KV heads, groups * T, E] over slots in float32."""
    values, scale = _numbers_and_scale(values)
    if scale is not None:
      weights = weights * scale.swapaxes(2, 3)
      values = values.astype(self.query.dtype)
    weights = weights.astype(values.dtype)
    return einsum_float32("bhqs,bhsd->bhqd", weights, values)

  def path_scores(self, keys, values, index: int) -> jax.Array:
    """Returns the scores [B, KV heads, groups * T, 1] of one of view.lags."""
    x = self._on_path(self.query, keys, index).sum(-1)
    if self.value_query is not None:
      x += self._on_path(self.value_query, values, index).sum(-1)
    x = softcap(self.scale * x, self.cap)
    unseen = jnp.arange(self.num_tokens) < self.view.lags[index]
    x = jnp.where(unseen, -jnp.inf, x)
    return x.reshape(*x.shape[:2], -1, 1)

  def path_weighted(self, weights: jax.Array, values, index: int) -> jax.Array:
    """Returns what one of view.lags adds to `weighted`; weights [..., 1]."""
    x = self._on_path(weights, values, index)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])

  def _on_path(self, x: jax.Array, slots: jax.Array, index: int) -> jax.Array:
    """Returns [B, KV heads, groups, T, D]: x [B, KV heads, groups * T, D or 1]
    times the slot that each token sees of a lag."""
    count, lag = self.num_tokens, self.view.lags[index]
    begin = self.view.mask.shape[-1] + index * count
    seen = slots[:, :, None, begin : begin + count - lag]
    seen = jnp.pad(seen, ((0, 0),) * 3 + ((lag, 0), (0, 0)))
    x = x.reshape(*x.shape[:2], -1, count, x.shape[-1])
    return x.astype(jnp.float32) * seen.astype(jnp.float32)


def _by_xla(
  query, keys, values, view, scale, cap, sink_logits, value_query=None
) -> jax.Array:
  """Returns [B, T, heads, E] in float32; arguments as of `attend`."""
  batch, num_tokens, num_heads, _ = query.shape
  num_kv_heads, num_slots, dim = _numbers_and_scale(values)[0].shape[1:]

  def grouped(query):
    query = query.reshape(batch, num_tokens, num_kv_heads, -1, query.shape[-1])
    query = query.transpose(0, 2, 3, 1, 4)
    return query.reshape(batch, num_kv_heads, -1, query.shape[-1])

  value_query = None if value_query is None else grouped(value_query)
  sink = None
  if sink_logits is not None:  # of each query, [1, KV heads, groups * T, 1]
    sink = jnp.repeat(sink_logits.astype(jnp.float32), num_tokens)
    sink = sink.reshape(1, num_kv_heads, -1, 1)
  if view.mask is None and num_slots <= BLOCK:
    view = view.masked(num_slots)
  attend_to = _in_blocks if view.mask is None else _at_once
  y = attend_to(
    _Queries(grouped(query), value_query, num_tokens, view, scale, cap),
    keys,
    values,
    sink,
  )
  return y.reshape(batch, num_heads, num_tokens, dim).swapaxes(1, 2)


def _at_once(queries: _Queries, keys, values, sink) -> jax.Array:
  """Returns [B, KV heads, groups * T, E]: attends to all slots at once, and to
  the paths after them."""
  view = queries.view
  count = view.mask.shape[-1]
  seen = jax.tree.map(lambda x: x[:, :, :count], (keys, values))
  x = [queries.scores(*seen, view.mask, jnp.arange(count))]
  paths = range(len(view.lags))
  x += [queries.path_scores(keys, values, i) for i in paths]
  if sink is not None:
    x.append(jnp.broadcast_to(sink, (*x[0].shape[:3], 1)))
  weights = jax.nn.softmax(jnp.concatenate(x, axis=-1), axis=-1)
  y = queries.weighted(weights[..., :count], seen[1])
  for i in paths:
    y += queries.path_weighted(weights[..., count + i, None], values, i)
  return y


def _in_blocks(queries: _Queries, keys, values, sink) -> jax.Array:
  """Returns [B, KV heads, groups * T, E]: reads BLOCK slots at a time, with a
  running maximum and sum."""
  view = queries.view
  num_slots, dim = _numbers_and_scale(values)[0].shape[2:]
  first, last = view.blocks(num_slots)
  # Sinks are in block 0, which is read ahead of a window's.
  has_sinks = (first > 0) & (view.sinks > 0)

  def body(i, carry):
    top, total, y = carry
    i = jnp.where(i < first, 0, i)
    start = jnp.minimum(i * BLOCK, num_slots - BLOCK)
    slots = start + jnp.arange(BLOCK)
    mask = view.mask_of(slots) & (slots >= i * BLOCK)[None, None]
    of_keys, of_values = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, BLOCK, axis=2),
      (keys, values),
    )
    if queries.value_query is not None:  # read once, for both products
      of_values = jax.lax.optimization_barrier(of_values)
    x = queries.scores(of_keys, of_values, mask, slots)
    new = jnp.maximum(top, x.max(-1, keepdims=True))
    shift = jnp.where(new == -jnp.inf, 0, new)
    x, decay = jnp.exp(x - shift), jnp.exp(top - shift)
    total = total * decay + x.sum(-1, keepdims=True)
    return new, total, y * decay + queries.weighted(x, of_values)

  zeros = jnp.zeros((*queries.query.shape[:-1], dim), jnp.float32)
  start = zeros[..., :1] - jnp.inf, zeros[..., :1], zeros
  if sink is not None:
    start = start[0].at[:].set(sink), start[1] + 1, zeros
  with jax.named_scope(LOOP):
    _, total, y = jax.lax.fori_loop(first - has_sinks, last, body, start)
  return y / total


def _products(keys, query: jax.Array) -> jax.Array:
  """Returns the products [B, KV heads, Q, S] of queries and slots."""
  keys, scale = _numbers_and_scale(keys)
  if scale is not None:
    keys = keys.astype(query.dtype)
  x = einsum_float32("bhsd,bhqd->bhsq", keys, query)
  return (x if scale is None else x * scale).swapaxes(2, 3)


def _numbers_and_scale(
  slots: jax.Array | Int8Slots,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the numbers in slots, and their scales; None: they have none."""
  if isinstance(slots, Int8Slots):
    return slots.values, slots.scale
  return slots, None


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
  """Bounds x smoothly to (-cap, cap); None returns x."""
  return x if cap is None else cap * jnp.tanh(x / cap)
