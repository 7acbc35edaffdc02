"""Objectives: functions (params, frozen, tokens) -> (loss, measures).

`tokens` is [B, T+1]; position t predicts token t+1. `frozen` are weights that
are used but not trained. Measures are means over positions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec.training import losses
from specdec.types import Array, Model, PyTree

Objective = Callable[[PyTree, PyTree, Array], tuple[Array, dict[str, Array]]]


def language_model(model: Model) -> Objective:
  """Builds the cross-entropy of a language model, in nats per token."""

  def objective(params, frozen, tokens):
    del frozen
    log_probs = _log_probs(model, params, tokens)
    loss = jnp.mean(losses.cross_entropy(log_probs, tokens[:, 1:]))
    return loss, {"cross_entropy": loss}

  return objective


def distillation(draft: Model, target: Model, loss: str) -> Objective:
  """Builds the objective of a draft model distilled from a frozen target.

  Measures: cross_entropy on the text; acceptance and agreement, the probability
  that a draft token is accepted at temperature 1 and at temperature 0, with the
  text as prefix, as at the first position of a round.

  Args:
    loss: 'cross_entropy' (on the text), or a key of losses.DISTANCES.

  Raises:
    ValueError: there is no such loss.
  """
  valid = ("cross_entropy", *losses.DISTANCES)
  if loss not in valid:
    raise ValueError(f"loss {loss!r} is unknown; known: {', '.join(valid)}")

  def objective(params, frozen, tokens):
    log_probs = _log_probs(draft, params, tokens)
    target_log_probs = jax.lax.stop_gradient(_log_probs(target, frozen, tokens))
    rejected = losses.total_variation(log_probs, target_log_probs)
    cross_entropy = jnp.mean(losses.cross_entropy(log_probs, tokens[:, 1:]))
    if loss == "cross_entropy":
      value = cross_entropy
    else:
      value = jnp.mean(losses.DISTANCES[loss](log_probs, target_log_probs))
    agree = jnp.argmax(log_probs, -1) == jnp.argmax(target_log_probs, -1)
    return value, {
      "cross_entropy": cross_entropy,
      "acceptance": 1 - jnp.mean(rejected),
      "agreement": jnp.mean(agree.astype(jnp.float32)),
    }

  return objective


def _log_probs(model: Model, params: PyTree, tokens: Array) -> Array:
  logits = model.apply(params, tokens[:, :-1], None)[0].logits
  return jax.nn.log_softmax(logits)
