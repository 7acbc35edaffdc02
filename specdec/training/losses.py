"""Losses on log-probabilities, one value per position.

Every loss takes float32 log-probabilities [..., V] and returns [...]. A draft
token is accepted with probability 1 - total_variation (Leviathan et al.,
arXiv:2211.17192); DistillSpec (arXiv:2310.08461) compares the divergences.
Unlike optax.losses.kl_divergence, these allow log-probabilities of -inf.
"""

import chex
import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(log_probs: Array, tokens: Array) -> Array:
  """Returns -log_probs [..., V] at tokens [...]."""
  chex.assert_equal_shape([log_probs[..., 0], tokens])
  return -jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def forward_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns KL(target || draft), which is mass-covering."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  return _kl(target_log_probs, log_probs)


def reverse_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns KL(draft || target), which is mode-seeking."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  return _kl(log_probs, target_log_probs)


def total_variation(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns half the L1 distance, the probability of rejecting a token."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  difference = jnp.exp(log_probs) - jnp.exp(target_log_probs)
  return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


def _kl(p: Array, q: Array) -> Array:
  # Tokens with probability 0 under p contribute 0, whatever their q.
  positive = p > -jnp.inf
  log_ratio = jnp.where(positive, p, 0.0) - jnp.where(positive, q, 0.0)
  return jnp.sum(jnp.exp(p) * log_ratio, axis=-1)


DISTANCES = {
  "forward_kl": forward_kl,
  "reverse_kl": reverse_kl,
  "total_variation": total_variation,
}
