"""From logits to probabilities: temperature, top-k and top-p in one warp.

Nothing here sorts the vocabulary (rule 11).
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec.types import Sampling

_COLDEST = np.finfo(np.float32).tiny  # less is greedy
HOTTEST = 1e37  # the reciprocal of more is flushed to 0
_UNROLLED = 8  # turns of a search written out; more of them are a loop
_INT_MIN, _INT_MAX = np.iinfo(np.int32).min, np.iinfo(np.int32).max


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

  valid = {
    "temperature": lambda x: (x >= 0) & (x <= HOTTEST),
    "top_k": lambda x: (x >= 1) & (x == np.floor(x)) & (x <= _INT_MAX),
    "top_p": lambda x: (np.float32(x) > 0) & (x <= 1),
  }

  def rows(name, value, accepted, dtype):
    if value is None:
      return None
    value = np.asarray(value, np.float64)
    if value.shape not in ((), (batch,)):
      raise ValueError(
        f"{name} has shape {value.shape}; it must be one value or {batch}, one "
        "a row"
      )
    bad = value[~valid[name](value)]
    if bad.size:
      raise ValueError(f"{name} = {bad[0]:g}; it must be {accepted}")
    return jnp.full((batch,), value.astype(dtype))

  return Sampling(
    rows("temperature", temperature, f"in [0, {HOTTEST:g}]", np.float32),
    rows("top_k", top_k, "an integer >= 1", np.int32),
    rows("top_p", top_p, "in (0, 1]", np.float32),
  )


def argmax(x: jax.Array) -> jax.Array:
  """First index of the maximum over the last axis, as two reductions.

  A maximum and a minimum over indices stay parallel over a sharded vocabulary.
  """
  return _first(x == jnp.max(x, axis=-1, keepdims=True))


def _first(matching: jax.Array) -> jax.Array:
  """First index that matches along the last axis, the last one if none does."""
  index = jax.lax.broadcasted_iota(jnp.int32, matching.shape, matching.ndim - 1)
  return jnp.min(jnp.where(matching, index, matching.shape[-1] - 1), axis=-1)


def top(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the `count` largest along the last axis in order: where they stand,
  no two in one place, and their values; of more than there are the rest at
  -inf, in the last place.

  Each is a reduction, which a sharded vocabulary keeps; no sort (rule 11).
  """
  column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)

  def take(taken, _):
    left = jnp.where(taken, -jnp.inf, x)
    value = jnp.max(left, axis=-1)
    place = _first(~taken & (left == value[..., None]))
    return taken | (column == place[..., None]), (place, value)

  taken, turns = jnp.zeros(x.shape, bool), min(count, _UNROLLED)
  _, (places, values) = jax.lax.scan(take, taken, length=count, unroll=turns)
  return jnp.moveaxis(places, 0, -1), jnp.moveaxis(values, 0, -1)


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
