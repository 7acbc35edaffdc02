"""Objectives: functions (params, frozen, tokens) -> (loss, measures).

`tokens` is [B, T+1], or data.Pairs for an encoder-decoder; position t predicts
token t+1. `frozen` are weights that are used but not trained. Measures are
means over positions, without padding. The losses below take float32
log-probabilities [..., V] and return [...]. A draft token is
accepted with probability 1 - total_variation (Leviathan et al.,
arXiv:2211.17192); DistillSpec (arXiv:2310.08461) compares the divergences.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from specdec.training.data import Pairs
from specdec.types import Array, Model, PyTree
from specdec.utils.spelling import check_choice

Objective = Callable[[PyTree, PyTree, PyTree], tuple[Array, dict[str, Array]]]


def cross_entropy(log_probs: Array, tokens: Array) -> Array:
  """Returns -log_probs [..., V] at tokens [...]."""
  chex.assert_equal_shape([log_probs[..., 0], tokens])
  return -jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def forward_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns KL(target || draft), which is mass-covering.

  Unlike optax's, it allows log-probabilities of -inf.
  """
  chex.assert_equal_shape([log_probs, target_log_probs])
  # Tokens that the target never emits contribute 0, whatever the draft's.
  positive = target_log_probs > -jnp.inf
  log_ratio = jnp.where(positive, target_log_probs, 0.0)
  log_ratio -= jnp.where(positive, log_probs, 0.0)
  return jnp.sum(jnp.exp(target_log_probs) * log_ratio, axis=-1)


def reverse_kl(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns KL(draft || target), which is mode-seeking."""
  return forward_kl(target_log_probs, log_probs)


def total_variation(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns half the L1 distance, the probability of rejecting a token."""
  chex.assert_equal_shape([log_probs, target_log_probs])
  difference = jnp.exp(log_probs) - jnp.exp(target_log_probs)
  return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


def mixed(kl: Array, distance: Array) -> Array:
  """Returns the LK hybrid loss (arXiv:2602.23881) of two losses [...].

  Forward KL while a token is mostly rejected, more and more the probability of
  rejection itself as it comes to be accepted.
  """
  share = jnp.exp(-3 * jax.lax.stop_gradient(1 - distance))
  return share * kl + (1 - share) * distance


def lk_hybrid(log_probs: Array, target_log_probs: Array) -> Array:
  """Returns `mixed` of forward KL and total variation."""
  pair = log_probs, target_log_probs
  return mixed(forward_kl(*pair), total_variation(*pair))


DIVERGENCES = {
  "forward_kl": forward_kl,
  "lk_hybrid": lk_hybrid,
  "reverse_kl": reverse_kl,
  "total_variation": total_variation,
}
LOSSES = ("cross_entropy", *DIVERGENCES)


def predictions(model: Model, params: PyTree, batch: PyTree) -> Array:
  """Returns logits [B, T, V] of a model's predictions for a batch."""
  if not isinstance(batch, Pairs):
    return model.apply(params, batch[:, :-1], None)[0].logits
  cross = model.encode(params, batch.source)
  return model.apply(params, batch.tokens[:, :-1], None, cross=cross)[0].logits


def labels(batch: PyTree) -> Array:
  """Returns the tokens [B, T] that a batch's positions predict."""
  return (batch.tokens if isinstance(batch, Pairs) else batch)[:, 1:]


def mean(values: Array, batch: PyTree) -> Array:
  """Returns the mean of values [B, T] over the positions of a batch."""
  if not isinstance(batch, Pairs):
    return jnp.mean(values)
  position = jnp.arange(values.shape[1])
  counts = (position[None] < batch.length[:, None]).astype(values.dtype)
  return jnp.sum(values * counts) / jnp.sum(counts)


def num_positions(batch: PyTree) -> Array | int:
  """Returns what a batch weighs in a mean over several.

  Positions without padding; or rows, if all have as many.
  """
  if isinstance(batch, Pairs):
    return batch.length.sum()
  return len(jax.tree.leaves(batch)[0])


def text_cross_entropy(logits: Array, batch: PyTree) -> Array:
  """Returns the mean cross-entropy of logits [B, T, V] on the text, in nats."""
  log_probs = jax.nn.log_softmax(logits)
  return mean(cross_entropy(log_probs, labels(batch)), batch)


def language_model(model: Model) -> Objective:
  """Builds the cross-entropy of a language model, in nats per token."""

  def objective(params, frozen, tokens):
    del frozen
    loss = text_cross_entropy(predictions(model, params, tokens), tokens)
    return loss, {"cross_entropy": loss}

  return objective


def distillation(draft: Model, target: Model, loss: str) -> Objective:
  """Builds the objective of a draft model distilled from a frozen target.

  Measures: cross_entropy on the text; acceptance and agreement, the probability
  that a draft token is accepted at temperature 1 and at temperature 0, with the
  text as prefix, as at the first position of a round.

  Args:
    loss: one of LOSSES; 'cross_entropy' is on the text.

  Raises:
    ValueError: there is no such loss.
  """
  check_choice("loss", loss, LOSSES)

  def objective(params, frozen, tokens):
    log_probs, target_log_probs = (
      jax.nn.log_softmax(predictions(model, weights, tokens))
      for model, weights in ((draft, params), (target, frozen))
    )
    target_log_probs = jax.lax.stop_gradient(target_log_probs)
    text_loss = mean(cross_entropy(log_probs, labels(tokens)), tokens)
    value = text_loss
    if loss != "cross_entropy":
      value = mean(DIVERGENCES[loss](log_probs, target_log_probs), tokens)
    agree = jnp.argmax(log_probs, -1) == jnp.argmax(target_log_probs, -1)
    rejected = mean(total_variation(log_probs, target_log_probs), tokens)
    return value, {
      "cross_entropy": text_loss,
      "acceptance": 1 - rejected,
      "agreement": mean(agree.astype(jnp.float32), tokens),
    }

  return objective
