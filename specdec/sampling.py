"""From logits to distributions and draws: one warp, and noise that has an
address.

Every key is folded from (row key, address), never from the order of calls
(rule 4): coupled noise from (row, absolute position), all other noise
from (row, committed length at the start of the round, stream, node), so that no
two uncoupled draws of a generation ever share noise. Nothing here sorts the
vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specdec.types import Sampling

# Streams never share noise: a draft's noise reused for the next token biases
# the text (vLLM #47386).
COUPLED, DRAFT, ACCEPT, NEXT = range(4)

_COLDEST = np.finfo(np.float32).tiny  # less is greedy
_HOTTEST = 1e37  # the reciprocal of more is flushed to 0
_INT_MIN = jnp.iinfo(jnp.int32).min


def settings(
  batch: int,
  temperature: float | jax.Array = 0.0,
  top_k: int | jax.Array | None = None,
  top_p: float | jax.Array | None = None,
) -> Sampling:
  """Sampling for `batch` rows, each argument one value or one a row.

  Raises:
    ValueError: a temperature outside [0, 1e37], top_k not an integer >= 1, or
      top_p outside (0, 1]; values for another number of rows.
  """

  def rows(name, value, valid, accepted, dtype):
    if value is None:
      return None
    value = np.asarray(value, np.float64)
    if value.shape not in ((), (batch,)):
      raise ValueError(
        f"{name} has shape {value.shape}; it must be one value or {batch}, one "
        "a row"
      )
    bad = value[~valid(value)]
    if bad.size:
      raise ValueError(f"{name} = {bad[0]:g}; it must be {accepted}")
    return jnp.full((batch,), value.astype(dtype))

  def is_temperature(x):
    return (x >= 0) & (x <= _HOTTEST)

  def is_count(x):
    return (x >= 1) & (x == np.floor(x)) & (x <= np.iinfo(np.int32).max)

  def is_mass(x):
    return (np.float32(x) > 0) & (x <= 1)

  accepted = f"in [0, {_HOTTEST:g}]"
  return Sampling(
    rows("temperature", temperature, is_temperature, accepted, np.float32),
    rows("top_k", top_k, is_count, "an integer >= 1", np.int32),
    rows("top_p", top_p, is_mass, "in (0, 1]", np.float32),
  )


def argmax(x: jax.Array) -> jax.Array:
  """First index of the maximum over the last axis, as two plain reductions.

  A maximum and a minimum over indices stay parallel over a sharded vocabulary.
  """
  index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
  best = jnp.max(x, axis=-1, keepdims=True)
  return jnp.min(jnp.where(x == best, index, x.shape[-1] - 1), axis=-1)


def _threefry(key: jax.Array) -> jax.Array:
  """Derives a threefry key from a key of any implementation.

  Takes typed keys (`jax.random.key`) and old ones (`jax.random.PRNGKey`). Other
  implementations draw a whole vmapped batch from its first key ('rbg'), so that
  a row's noise would depend on its neighbours.
  """
  typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
  if typed and jnp.ndim(key) == 0:
    key = jax.random.key_data(key)
  words = jnp.ndim(key) == 1 and jnp.result_type(key) == jnp.uint32
  if not words or jnp.size(key) < 2:
    raise ValueError("key is not one JAX random key; take jax.random.key(seed)")
  derived = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
  for word in key[2:]:
    derived = jax.random.fold_in(derived, word)
  return derived


def row_keys(key: jax.Array, index: jax.Array) -> jax.Array:
  """[B] keys, from the prompts' indices [B] and not their slots in a batch."""
  key = _threefry(key)
  return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def pilot_key(key: jax.Array) -> jax.Array:
  """Derives the key of runs that decide how others decode (`--k=auto`).

  A decision that had seen the noise that then writes the text would bias it
  (rule 7). No row has this index: indices are non-negative int32.
  """
  return jax.random.fold_in(_threefry(key), jnp.uint32(2**32 - 1))


def fold(keys: jax.Array, *address: jax.Array | int) -> jax.Array:
  """[B] keys for one address; each part is a number or [B] numbers."""
  for part in address:
    part = jnp.broadcast_to(jnp.asarray(part, jnp.int32), keys.shape)
    keys = jax.vmap(jax.random.fold_in)(keys, part)
  return keys


@dataclasses.dataclass(frozen=True)
class Noise:
  """All noise of one round."""

  keys: jax.Array  # [B]
  length: jax.Array  # [B] committed tokens at the start of the round
  vocab_size: int
  coupled: bool  # drafter and target share one vector a position
  wanted: jax.Array | bool = True  # False: every row is greedy, draw nothing

  def _gumbel(self, *address) -> jax.Array:
    keys = fold(self.keys, *address)
    draw = jax.vmap(lambda key: jax.random.gumbel(key, (self.vocab_size,)))
    shape = (self.keys.shape[0], self.vocab_size)
    return jax.lax.cond(self.wanted, draw, lambda _: jnp.zeros(shape), keys)

  def at_position(self, position: jax.Array) -> jax.Array:
    """[B, V] Gumbel noise that decides the token at position [B]."""
    return self._gumbel(COUPLED, position)

  def draft(self, depth, node) -> jax.Array:
    """[B, V] Gumbel noise to draw node `node` at depth `depth`.

    With node [F] (and depth a number or [F]) the answer is [B, F, V].
    """
    if jnp.ndim(node):
      depth = jnp.broadcast_to(depth, jnp.shape(node))
      return jnp.stack(
        [self.draft(depth[i], node[i]) for i in range(len(node))], axis=1
      )
    if self.coupled:
      return self.at_position(self.length - 1 + depth)
    return self._gumbel(DRAFT, self.length, node)

  def accept(self, num_nodes: int) -> jax.Array:
    """[B, N] uniforms in [0, 1), one a node."""
    columns = [
      jax.vmap(jax.random.uniform)(fold(self.keys, ACCEPT, self.length, node))
      for node in range(num_nodes)
    ]
    return jnp.stack(columns, axis=1)

  def next(self, node: jax.Array) -> jax.Array:
    """[B, V] Gumbel noise for the token after the last kept node [B]."""
    return self._gumbel(NEXT, self.length, node)


def warp(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """The distribution that sampling asks for: temperature, then top-k, then
  top-p.

  The only place where the three meet logits, for target and drafter alike. Ties
  at a threshold are all kept, so the distribution does not depend on token
  order.

  Args:
    logits: [B, ..., V].
    sampling: one setting a row.

  Returns:
    [B, ..., V] float32 log-probabilities, -inf where a filter cut. Temperature
    0 is a point mass on the first maximum. All nan where a logit is nan or
    infinite, or all are -inf.
  """
  logits = logits.astype(jnp.float32)

  def per_row(x):
    return x.reshape(x.shape + (1,) * (logits.ndim - 1))

  temperature = per_row(sampling.temperature)
  greedy = temperature < _COLDEST
  largest = jnp.max(logits, axis=-1, keepdims=True)
  scaled = logits - largest  # so that small temperatures cannot overflow
  scaled /= jnp.where(greedy, 1.0, temperature)
  if sampling.top_k is not None:
    scaled = _top_k(scaled, per_row(sampling.top_k))
  if sampling.top_p is not None:
    scaled = _top_p(jax.nn.log_softmax(scaled), per_row(sampling.top_p))
  log_mass = jnp.log(jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True))
  index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  point = jnp.where(index == argmax(logits)[..., None], 0.0, -jnp.inf)
  point += 0.0 * log_mass  # nan where a logit is; a maximum may pass over one
  return jnp.where(greedy, point, scaled - log_mass)


def _ordered_bits(x: jax.Array) -> jax.Array:
  """Float32 as int32 in the same order, both zeros alike."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  bits = jnp.where(x == 0, 0, bits)
  return jnp.where(bits < 0, _INT_MIN - bits - 1, bits)


def _largest_bits(holds, low: jax.Array, high: jax.Array) -> jax.Array:
  """Largest int32 t in [low, high) with holds(t), which is monotone in t.

  `holds(low)` must be true. Bisection over the bits of a float is exact and
  takes at most 32 rounds whatever the values are.
  """

  def middle(bounds):
    low, high = bounds
    return (low & high) + ((low ^ high) >> 1)  # their mean, no overflow

  def step(bounds):
    low, high = bounds
    half = middle(bounds)
    above = holds(half)
    return jnp.where(above, half, low), jnp.where(above, high, half)

  return jax.lax.while_loop(
    lambda bounds: jnp.any(middle(bounds) > bounds[0]), step, (low, high)
  )[0]


def _top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
  """-inf below the k-th largest logit; top_k [B, 1.., 1]."""
  bits = _ordered_bits(logits)
  shape = bits.shape[:-1] + (1,)
  low = jnp.full(shape, _INT_MIN)
  high = jnp.max(bits, axis=-1, keepdims=True) + 1
  wanted = jnp.minimum(top_k, logits.shape[-1])

  def holds(threshold):
    return jnp.sum(bits >= threshold, axis=-1, keepdims=True) >= wanted

  return jnp.where(bits >= _largest_bits(holds, low, high), logits, -jnp.inf)


def _top_p(log_probs: jax.Array, top_p: jax.Array) -> jax.Array:
  """-inf outside the smallest set of likeliest tokens of mass >= top_p."""
  probs = jnp.exp(log_probs)
  # None is negative, so their bits have their order.
  # All tokens below (1 - top_p) / V together weigh less than 1 - top_p.
  low = _ordered_bits((1 - top_p) / (2 * probs.shape[-1]))
  low = jnp.broadcast_to(low, probs.shape[:-1] + (1,))
  high = _ordered_bits(jnp.max(probs, axis=-1, keepdims=True)) + 1

  def reaches(bits):
    return probs >= jax.lax.bitcast_convert_type(bits, jnp.float32)

  def holds(bits):
    mass = jnp.sum(jnp.where(reaches(bits), probs, 0.0), axis=-1, keepdims=True)
    # 1 keeps everything, also what rounding would call the last of the mass.
    return (mass >= top_p) & (top_p < 1)

  return jnp.where(
    reaches(_largest_bits(holds, low, high)), log_probs, -jnp.inf
  )
