"""Objectives: functions (params, frozen, tokens) -> (loss, measures).

`tokens` is [B, T+1]; position t predicts token t+1. `frozen` are weights that
are used and not trained. Measures are means over positions, worth a curve.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec.training import losses
from specdec.types import Array, Model, PyTree

Objective = Callable[[PyTree, PyTree, Array], tuple[Array, dict[str, Array]]]


def language_model(model: Model) -> Objective:
  """Cross-entropy on the text itself, in nats a token."""

  def objective(params, frozen, tokens):
    del frozen
    distribution = _log_probs(model, params, tokens)
    loss = jnp.mean(losses.cross_entropy(distribution, tokens[:, 1:]))
    return loss, {"cross_entropy": loss}

  return objective


def distillation(draft: Model, target: Model, loss: str) -> Objective:
  """A draft against its target, whose weights are `frozen`.

  Args:
    loss: 'cross_entropy' (on the text), or a name of losses.DISTANCES.

  Measures: cross_entropy on the text; acceptance, the probability that a token
  drawn from the draft is kept at temperature 1; agreement, the same at
  temperature 0. All of the two distributions after the text's own prefix, which
  is what decoding sees at a round's first position.
  """
  known = ("cross_entropy", *losses.DISTANCES)
  if loss not in known:
    raise ValueError(f"loss {loss!r} is unknown; known: {', '.join(known)}")

  def objective(params, frozen, tokens):
    distribution = _log_probs(draft, params, tokens)
    goal = jax.lax.stop_gradient(_log_probs(target, frozen, tokens))
    refused = losses.total_variation(distribution, goal)
    text = jnp.mean(losses.cross_entropy(distribution, tokens[:, 1:]))
    if loss == "cross_entropy":
      value = text
    else:
      value = jnp.mean(losses.DISTANCES[loss](distribution, goal))
    agree = jnp.argmax(distribution, -1) == jnp.argmax(goal, -1)
    return value, {
      "cross_entropy": text,
      "acceptance": 1 - jnp.mean(refused),
      "agreement": jnp.mean(agree.astype(jnp.float32)),
    }

  return objective


def _log_probs(model: Model, params: PyTree, tokens: Array) -> Array:
  logits = model.apply(params, tokens[:, :-1], None)[0].logits
  return jax.nn.log_softmax(logits)
