"""The one warp against a sort, and draws against distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import sampling
from specdec.noise import Noise, row_keys

V = 7


def reference(logits, temperature, top_k, top_p):
  """Temperature, then top-k, then top-p, by sorting; float64 probabilities."""
  if temperature == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  scaled = logits.astype(float) / temperature
  kept = np.ones(len(logits), bool)
  if top_k is not None:
    kept &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
  probs = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
  probs /= probs.sum()
  if top_p is not None:
    order = np.sort(probs)[::-1]
    last = np.argmax(np.cumsum(order) >= top_p - 1e-12)
    probs = np.where(probs >= order[last], probs, 0.0)
  return probs / probs.sum()


def rows():
  """Logits with ties, signs, zeros of both signs, -inf and wide spreads."""
  rng = np.random.default_rng(0)
  normal = 2 * rng.normal(size=(12, V))
  ties = rng.integers(-1, 2, size=(12, V)).astype(float)
  wide = 30 * rng.normal(size=(4, V))
  special = np.array(
    [
      [0.0, -0.0, 0.0, -1.0, 1.0, -0.0, 2.0],
      [-np.inf, 0.0, -np.inf, 1.0, -np.inf, -2.0, -3.0],
      [-5.0, -4.0, -3.0, -2.0, -1.0, -6.0, -7.0],
      [1.0] * V,
      [-np.inf] * (V - 1) + [0.0],
    ]
  )
  return np.concatenate([normal, ties, wide, special]).astype(np.float32)


@pytest.mark.parametrize("top_k", [None, [1, 2, 3, 7, 50]])
@pytest.mark.parametrize("top_p", [None, [0.05, 0.33, 0.51, 0.8, 0.97]])
def test_b10_warp_is_temperature_then_top_k_then_top_p(top_k, top_p):
  logits = rows()
  rng = np.random.default_rng(1)
  pick = {
    "temperature": rng.choice([0.0, 0.4, 1.0, 1.7], size=len(logits)),
    "top_k": None if top_k is None else rng.choice(top_k, size=len(logits)),
    "top_p": None if top_p is None else rng.choice(top_p, size=len(logits)),
  }
  settings = sampling.settings(len(logits), **pick)
  # A node axis, as decoding has it: [B, 2, V].
  double = jnp.stack([jnp.asarray(logits), jnp.asarray(logits[:, ::-1])], 1)
  distribution = np.exp(
    np.asarray(jax.jit(sampling.warp)(double, settings), float)
  )
  for row, got in enumerate(distribution):
    options = [x if x is None else x[row] for x in pick.values()]
    for node in range(2):
      expected = reference(np.asarray(double[row, node]), *options)
      np.testing.assert_allclose(got[node], expected, atol=2e-6)


def test_b10_the_order_of_the_filters_matters():
  """Top-p after temperature: the reversed order would keep other tokens."""
  logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
  distribution = sampling.warp(logits, sampling.settings(1, 3.0, None, 0.7))
  assert int(jnp.sum(distribution > -jnp.inf)) == 3  # 2 if top-p came first


def test_ties_of_signed_zeros_are_all_kept():
  logits = jnp.array([[0.0, -0.0, 0.0, -1.0, -0.0]])
  distribution = jnp.exp(sampling.warp(logits, sampling.settings(1, 1.0, 2)))
  np.testing.assert_allclose(
    distribution, [[0.25, 0.25, 0.25, 0, 0.25]], atol=1e-6
  )


def test_b09_temperatures_near_zero_stay_distributions():
  logits = jnp.array([[1.0, 2.0, 1.5], [1.0, 2.0, 1.5], [1.0, 2.0, 1.5]])
  settings = sampling.settings(3, np.array([0.0, 1e-6, 1e-38]))
  distribution = sampling.warp(logits, settings)
  np.testing.assert_array_equal(jnp.argmax(distribution, -1), [1, 1, 1])
  np.testing.assert_allclose(jnp.exp(distribution).sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-37, 1e-20, 1e37])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_no_temperature_overflows(temperature, filters):
  logits = jnp.array([[-90.0, 20.0, 20.0, 19.0, -jnp.inf]])
  settings = sampling.settings(1, temperature, **filters)
  [distribution] = jnp.exp(sampling.warp(logits, settings))
  two = temperature < 1 or "top_k" in filters
  wanted = [0, 0.5, 0.5, 0, 0] if two else [0.25] * 4 + [0]
  np.testing.assert_allclose(distribution, wanted, atol=1e-6)


@pytest.mark.parametrize(
  "options, sentence",
  [
    ({"temperature": -1.0}, r"temperature = -1; it must be in \[0, 1e\+37\]"),
    ({"temperature": np.inf}, "temperature = inf"),
    ({"temperature": 1e39}, r"temperature = 1e\+39"),
    ({"temperature": [1.0, 1.0, 1.0]}, "one value or 2, one a row"),
    ({"top_k": 0}, "top_k = 0; it must be an integer >= 1"),
    ({"top_k": 2.5}, "top_k = 2.5"),
    ({"top_k": 2**31}, "top_k = 2.14748e"),
    ({"top_p": 0.0}, r"top_p = 0; it must be in \(0, 1\]"),
    ({"top_p": 1e-60}, "top_p = 1e-60"),
    ({"top_p": np.array([0.5, 1.5])}, r"top_p = 1\.5"),
    ({"temperature": np.nan}, "temperature = nan"),
  ],
)
def test_settings_that_are_refused(options, sentence):
  with pytest.raises(ValueError, match=sentence):
    sampling.settings(2, **options)


@pytest.mark.parametrize("count", [1, 4, 9, 20])
def test_top_is_a_stable_sort_by_a_short_loop(count):
  rng = np.random.default_rng(count)
  x = rng.integers(0, 6, (3, 2, 20)).astype(np.float32)
  x[:, :, 12:] = -np.inf  # of which none comes twice either
  places, values = sampling.top(jnp.asarray(x), count)
  wanted = np.argsort(-x, axis=-1, kind="stable")[..., :count]
  np.testing.assert_array_equal(places, wanted)
  np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, -1))
  _, more = sampling.top(jnp.asarray(x), 22)
  assert np.all(np.isneginf(more[..., 12:]))


def test_b04_gumbel_draws_follow_each_rows_own_distribution():
  size, half = 20_000, 10_000
  distributions = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], np.float32)
  keys = row_keys(jax.random.key(3), jnp.arange(size))
  noise = Noise(keys, jnp.full((size,), 4), 3, False)
  distribution = jnp.log(jnp.asarray(distributions.repeat(half, 0)))
  tokens = np.asarray(
    sampling.argmax(distribution + noise.next(jnp.zeros((size,))))
  )
  for part, expected in zip(tokens.reshape(2, half), distributions):
    share = np.bincount(part, minlength=3) / half
    np.testing.assert_allclose(share, expected, atol=0.02)
