"""Objective of draft heads: teacher-forced draft tokens of a frozen target.

Every position of a text is the root of a draft (drafters/heads/unroll.py), and
level j of the draft has weight decay^j. A parallel head drafts all levels in
one pass: only some positions are the root of a whole draft (rounds.py), and
every slot of level j has that weight.
"""

import jax
import jax.numpy as jnp
import optax

from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_head import AnyHead
from specdec.drafters.heads.draft_head import DraftHead
from specdec.drafters.heads.unroll import unroll, unroll_slots, valid
from specdec.sharding import Placement
from specdec.training import block_drafting, draft_losses, rounds
from specdec.training.draft_losses import LOSSES, Aim, Loss, TokenDrop
from specdec.training.objective import Objective
from specdec.types import Array, Model, ModelOutput, Params, PyTree

__all__ = ["LOSSES", "Loss", "loss_of_output", "objective"]


def objective(
  draft_head: AnyHead,
  target: Model,
  loss: Loss,
  measure: bool = True,
  seed: int = 0,
  place: Placement | None = None,
) -> Objective:
  """Builds the objective of a draft head, with the target's weights frozen.

  The objective takes tokens [B, T+1], or a batch of training/hidden.py with the
  target's hidden states. Of a BlockHead, it is block_drafting's.

  Args:
    seed: of the positions at which blocks and parallel drafts begin.
    place: of the head on a mesh.
    measure: also returns, for each level j from 1, acceptance_j and
      agreement_j: the probability that a draft token is accepted at temperature
      1 and 0, with the text as prefix. Without it a step is faster.

  Raises:
    ValueError: of draft_losses.check.
  """
  draft_losses.check(loss, draft_head.head_config)
  block = draft_head.head_config.block

  def objective(net, frozen, batch):
    states = batch if isinstance(batch, dict) else {"tokens": batch}
    tokens = states["tokens"]
    text, labels = tokens[:, :-1], tokens[:, 1:]
    if "last" in states:  # only the final norm is left to run
      output, _ = target.apply(
        frozen,
        text,
        None,
        start=target.num_layers,
        hidden=states["last"],
        head=False,
      )
      output = output._replace(features=tuple(states["features"]))
    else:
      output, _ = target.apply(
        frozen, text, None, head=False, features=draft_head.features
      )
    goal = draft_losses.aim_of_hidden(
      draft_head, frozen, output.hidden, labels, place
    )
    compute = block_drafting.loss_of_output if block else loss_of_output
    given = states, *jax.lax.stop_gradient((output, goal))
    return compute(draft_head, loss, net, frozen, *given, measure, seed)

  return objective


def loss_of_output(
  draft_head: DraftHead,
  loss: Loss,
  net: PyTree,
  target: PyTree,
  batch: dict[str, Array],
  output: ModelOutput,
  goal: Aim,
  measure: bool = True,
  seed: int = 0,
) -> tuple[Array, dict[str, Array]]:
  """Computes loss and measures of `objective` from the target's output.

  Args:
    target: weights of the target.
    batch: tokens [B, T+1], and the addresses step and row [B].
    output: of the target on tokens[:, :-1].
    goal: what it says there, draft_losses.aim.
  """
  text = batch["tokens"][:, :-1]
  length, levels = text.shape[1], draft_head.head_config.levels
  target_weights = draft_heads.target_weights_of(
    Params(target, draft_heads.weights_of(draft_head, net, target))
  )
  given = draft_head, net, target_weights, text, output
  goals = [goal] * levels
  if draft_head.head_config.parallel:
    slots = rounds.slots_of(
      batch, levels, loss.drop or TokenDrop(), seed, draft_head.start
    )
    logits, hidden = unroll_slots(*given, slots), ()
    place = slots.by_level(slots.positions)
    goals[1:] = [goal.at(x) for x in place[1:]]
  else:
    logits, hidden = unroll(*given, levels)
  total, weights, measures = 0.0, 0.0, {}
  for level in range(levels):
    if level and draft_head.head_config.parallel:
      mask = jnp.ones((1, logits[level].shape[1]))
    else:
      mask = valid(draft_head, length, level)[None].astype(jnp.float32)
    count = text.shape[0] * jnp.sum(mask)

    def mean(x, mask=mask, count=count):
      return jnp.sum(x * mask) / count

    log_probs = jax.nn.log_softmax(logits[level])
    value = draft_losses.token_loss(loss.divergence, log_probs, goals[level])
    level_loss = loss.token_weight * mean(value)
    if loss.feature_weight:
      pair = optax.tree.cast((hidden[level], output.hidden), jnp.float32)
      distance = optax.losses.huber_loss(*pair)
      level_loss += loss.feature_weight * mean(jnp.mean(distance, axis=-1))
    weight = loss.decay**level
    if draft_head.head_config.parallel:  # every slot counts the same
      weight *= count / text.size
    total, weights = total + weight * level_loss, weights + weight
    if measure:
      rejected = draft_losses.rejected(log_probs, goals[level])
      agree = jnp.argmax(log_probs, axis=-1) == goals[level].best
      measures[f"acceptance_{level + 1}"] = 1 - mean(rejected)
      measures[f"agreement_{level + 1}"] = mean(agree.astype(jnp.float32))
  return total / weights, measures
