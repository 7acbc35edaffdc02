"""Texts that walk along the vocabulary: what can be known of them is known.

A token is the one before it plus one step of STEPS, drawn with ODDS.
"""

import jax
import numpy as np
import optax

from learned_kinds import V, target
from specdec.drafters.heads.draft_head import DraftHead
from specdec.training import drafting
from specdec.training.draft_losses import Loss

STEPS, ODDS = (1, 2), (0.9, 0.1)


def batch_of(number: int) -> dict[str, np.ndarray]:
  """Returns the batch of a training step: 16 texts."""
  rng = np.random.default_rng(number)
  start = rng.integers(0, V, (16, 1))
  steps = rng.choice(STEPS, (16, 32), p=ODDS)
  tokens = np.concatenate([start, start + np.cumsum(steps, axis=1)], axis=1)
  batch = {"step": np.full(16, number, np.int32), "row": np.arange(16)}
  return batch | {"tokens": (tokens % V).astype(np.int32)}


def entropies(steps: int) -> list[float]:
  """Returns, of one step and of each further one, the entropy of their sum.

  It is the least cross-entropy of a drafter that knows where a walk began.
  """
  spread, entropies = np.array([1.0]), []
  for _ in range(steps):
    spread = np.convolve(spread, ODDS)
    entropies.append(-(spread * np.log(spread)).sum())
  return entropies


def learned(head: DraftHead, loss: Loss, steps: int) -> float:
  """Trains a head on walks; returns its loss, the mean of the last 20 steps."""
  model, params = target()
  objective = drafting.objective(head, model, loss, measure=False)
  optimizer = optax.adam(5e-3)

  @jax.jit
  def step(net, state, batch):
    grade = jax.value_and_grad(objective, has_aux=True)
    (value, _), gradient = grade(net, params, batch)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(net, updates), state, value

  net, values = head.init(jax.random.key(1)), []
  state = optimizer.init(net)
  for number in range(steps):
    net, state, value = step(net, state, batch_of(number))
    values.append(float(value))
  return float(np.mean(values[-20:]))
