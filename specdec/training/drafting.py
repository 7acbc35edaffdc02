"""Objective of draft heads: teacher-forced draft tokens of a frozen target.

Every position of a text is the root of a draft (drafters/heads/unroll.py), and
level j of the draft has weight decay^j. A head with a reduced vocabulary is
compared with the target's probabilities of those tokens; the remaining
probability mass always counts as rejected.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.draft_head import DraftHead
from specdec.drafters.heads.unroll import unroll, valid
from specdec.training import objective as objectives
from specdec.training.objective import LOSSES, Objective
from specdec.training.options import check_choice, check_range
from specdec.types import Array, Model, ModelOutput, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Loss:
  """Loss of draft tokens."""

  # One of LOSSES; 'cross_entropy' is of the text's next token, the others are
  # divergences from the target's distribution.
  divergence: str = "forward_kl"
  token_weight: float = 1.0  # of the divergence
  # Of the smooth L1 distance between the head's hidden states and the target's.
  feature_weight: float = 0.0
  decay: float = 0.8  # weight of a level relative to the previous one

  def __post_init__(self):
    check_choice(self, "divergence", LOSSES)
    for name in ("token_weight", "feature_weight", "decay"):
      check_range(self, name, 0)


def objective(
  draft_head: DraftHead, target: Model, loss: Loss, measure: bool = True
) -> Objective:
  """Builds the objective of a draft head, with the target's weights frozen.

  The objective takes tokens [B, T+1], or a batch of training/hidden.py with the
  target's hidden states.

  Args:
    measure: also returns, for each level j from 1, acceptance_j and
      agreement_j: the probability that a draft token is accepted at temperature
      1 and 0, with the text as prefix. Without it a step is faster.

  Raises:
    ValueError: feature_weight with a kind that does not predict hidden states.
  """
  if loss.feature_weight and not draft_head.head_config.predicts_hidden:
    raise ValueError(
      f"feature_weight = {loss.feature_weight}: a head of kind "
      f"{draft_head.head_config.kind!r} does not predict the target's hidden "
      "states; only 'eagle' does"
    )

  def objective(net, frozen, tokens):
    if isinstance(tokens, dict):  # only final norm and head are left to run
      states, tokens = tokens, tokens["tokens"]
      output, _ = target.apply(
        frozen,
        tokens[:, :-1],
        None,
        start=target.num_layers,
        hidden=states["last"],
      )
      output = output._replace(features=states["features"])
    else:
      output, _ = target.apply(
        frozen, tokens[:, :-1], None, features=draft_head.features
      )
    output = jax.lax.stop_gradient(output)
    return loss_of_output(
      draft_head, loss, net, frozen, tokens, output, measure
    )

  return objective


def loss_of_output(
  draft_head: DraftHead,
  loss: Loss,
  net: PyTree,
  target: PyTree,
  tokens: Array,
  output: ModelOutput,
  measure: bool = True,
) -> tuple[Array, dict[str, Array]]:
  """Computes loss and measures of `objective` from the target's output.

  Args:
    target: weights of the target.
    tokens: [B, T+1].
    output: of the target on tokens[:, :-1], with logits.
  """
  text, labels = tokens[:, :-1], tokens[:, 1:]
  length, levels = text.shape[1], draft_head.head_config.levels
  target_weights = draft_heads.target_weights_of(
    Params(target, draft_heads.weights_of(draft_head, net, target))
  )
  target_log_probs = jax.nn.log_softmax(output.logits)
  target_argmax = jnp.argmax(target_log_probs, axis=-1)
  head_index = jnp.arange(draft_head.vocab_size)  # of a token; -1: not drafted
  if draft_head.ids is not None:
    target_log_probs = target_log_probs[..., draft_head.ids]
    head_index = jnp.full_like(head_index, -1)
    head_index = head_index.at[draft_head.ids].set(
      jnp.arange(len(draft_head.ids))
    )
  target_probs = jnp.exp(target_log_probs)
  uncovered = 1 - jnp.sum(target_probs, axis=-1)  # mass it cannot draft
  negative_entropy = jnp.sum(target_probs * target_log_probs, axis=-1)
  logits, hidden = unroll(draft_head, net, target_weights, text, output, levels)
  total, measures = 0.0, {}
  for level in range(levels):
    mask = valid(draft_head, length, level)[None].astype(jnp.float32)
    count = text.shape[0] * jnp.sum(mask)

    def mean(x, mask=mask, count=count):
      return jnp.sum(x * mask) / count

    log_probs = jax.nn.log_softmax(logits[level])
    if measure or loss.divergence == "total_variation":
      rejected = objectives.total_variation(log_probs, target_log_probs)
      rejected += uncovered / 2
    if loss.divergence == "cross_entropy":
      covered = head_index[labels] >= 0
      value = objectives.cross_entropy(
        log_probs, jnp.maximum(head_index[labels], 0)
      )
      value = jnp.where(covered, value, 0.0)
    elif loss.divergence == "total_variation":
      value = rejected
    elif loss.divergence == "reverse_kl":
      value = objectives.reverse_kl(log_probs, target_log_probs)
    else:  # forward KL; its first term is the same for all levels
      value = negative_entropy - jnp.sum(target_probs * log_probs, axis=-1)
    level_loss = loss.token_weight * mean(value)
    if loss.feature_weight:
      distance = optax.losses.huber_loss(hidden[level], output.hidden)
      level_loss += loss.feature_weight * mean(jnp.mean(distance, axis=-1))
    total += loss.decay**level * level_loss
    if measure:
      agree = jnp.argmax(log_probs, axis=-1) == head_index[target_argmax]
      measures[f"acceptance_{level + 1}"] = 1 - mean(rejected)
      measures[f"agreement_{level + 1}"] = mean(agree.astype(jnp.float32))
  weight = sum(loss.decay**level for level in range(levels))
  return total / weight, measures
