"""What a model is trained on, one position at a time.

Every loss takes logits or log-distributions of float32 and returns one number a
position. Distances between distributions are what decides acceptance: a draft
token is kept with probability 1 - total_variation (Leviathan et al.,
arXiv:2211.17192). DistillSpec (arXiv:2310.08461) compares the four.
"""

import chex
import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(log_probs: Array, tokens: Array) -> Array:
  """-log of the distribution [..., V] at tokens [...]."""
  chex.assert_equal_shape([log_probs[..., 0], tokens])
  return -jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def forward_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """KL(target || draft): the draft must cover whatever the target may say."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  return _kl(target_log_probs, log_probs)


def reverse_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """KL(draft || target): the draft keeps to what the target would say."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  return _kl(log_probs, target_log_probs)


def total_variation(log_probs: Array, target_log_probs: Array) -> Array:
  """Half the L1 distance: the probability that a draft token is refused."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  difference = jnp.exp(log_probs) - jnp.exp(target_log_probs)
  return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


def _kl(p: Array, q: Array) -> Array:
  # A token that p gives nothing costs nothing, whatever q says of it.
  some = p > -jnp.inf
  ratio = jnp.where(some, p, 0.0) - jnp.where(some, q, 0.0)
  return jnp.sum(jnp.exp(p) * ratio, axis=-1)


DISTANCES = {
  "forward_kl": forward_kl,
  "reverse_kl": reverse_kl,
  "total_variation": total_variation,
}
