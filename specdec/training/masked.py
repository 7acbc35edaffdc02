"""Objective of a draft model that is taught to draft from mask tokens.

PARD (arXiv:2504.18583): one pass over a text and the mask slots of many rounds
after it, which thin out level by level (rounds.py). All slots weigh the same.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.training import rounds
from specdec.training.draft_losses import TokenDrop
from specdec.training.objective import (
  DIVERGENCES,
  LOSSES,
  Objective,
  cross_entropy,
  total_variation,
)
from specdec.training.options import check_range
from specdec.types import Model
from specdec.utils.spelling import check_choice


@dataclasses.dataclass(frozen=True)
class Masks(TokenDrop):
  """Mask slots of a draft model; it drafts `levels` tokens in one pass."""

  least: float = 0.1
  levels: int = 8

  def __post_init__(self):
    super().__post_init__()
    check_range(self, "levels", 1, prefix="masks.")


def distillation(
  draft: Model,
  target: Model,
  loss: str,
  masks: Masks,
  mask_token: int,
  seed: int = 0,
) -> Objective:
  """Builds the objective of a draft model, distilled from a frozen target.

  It takes tokens [B, T + 1], or a batch of data.Numbered. Measures:
  cross_entropy on the text at level 1; acceptance_j and agreement_j, the
  probability that a draft token of level j is accepted at temperature 1 and 0,
  with the text as prefix.

  Args:
    loss: one of objective.LOSSES; 'cross_entropy' is on the text.
    mask_token: of the draft.
    seed: of the rounds whose slots are trained.

  Raises:
    ValueError: there is no such loss.
  """
  check_choice("loss", loss, LOSSES)

  def objective(params, frozen, batch):
    batch = batch if isinstance(batch, dict) else {"tokens": batch}
    text, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    slots = rounds.slots_of(batch, masks.levels, masks, seed)
    output, _ = draft.apply(
      params, slots.tokens(text, mask_token), None, seen=slots.view()
    )
    log_probs = jax.nn.log_softmax(output.logits)
    goal = jax.nn.log_softmax(target.apply(frozen, text, None)[0].logits)
    goal = jax.lax.stop_gradient(goal)
    place = slots.positions
    goal = jnp.take_along_axis(goal, place[:, :, None], axis=1)
    labels = jnp.take_along_axis(labels, place, axis=1)
    text_loss = cross_entropy(log_probs, labels)
    value = text_loss
    if loss != "cross_entropy":
      value = DIVERGENCES[loss](log_probs, goal)
    agree = jnp.argmax(log_probs, -1) == jnp.argmax(goal, -1)
    rejected = total_variation(log_probs, goal)
    measures = {"cross_entropy": jnp.mean(slots.by_level(text_loss)[0])}
    for name, x in (("acceptance", 1 - rejected), ("agreement", agree)):
      for level, part in enumerate(slots.by_level(x), 1):
        measures[f"{name}_{level}"] = jnp.mean(part.astype(jnp.float32))
    return jnp.mean(value), measures

  return objective
