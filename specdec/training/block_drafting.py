"""Objective of block drafters: blocks at random positions of a frozen target's
texts.

Every block sees the target's hidden states strictly before its anchor
(drafters/heads/block_unroll.py), and its draft tokens are compared with what
the target says along the text. Where a batch has addresses (data.Numbered) the
anchors are drawn, without replacement and as a function of (seed, step, row);
elsewhere, as in evaluation, they are evenly spaced, and levels weigh by decay.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_head import BlockHead
from specdec.drafters.heads.block_unroll import context_of, unroll
from specdec.training import draft_losses
from specdec.training.data import draws
from specdec.training.draft_losses import Aim, BlockLoss, Loss
from specdec.types import Array, ModelOutput, Params, PyTree


def anchors_of(
  batch: dict[str, Array], count: int, levels: int, seed: int
) -> Array:
  """Returns the positions [B, A] at which blocks begin, A = count at most.

  Every one has `levels` labels after it.

  Raises:
    ValueError: a sequence is shorter than a draft.
  """
  rows, size = batch["tokens"].shape
  places = size - levels  # the last column is only a label
  if places < 1:
    raise ValueError(
      f"a sequence of {size - 1} tokens; a block drafts {levels}"
    )
  count = min(count, places)
  if "step" not in batch:
    even = np.linspace(0, places - 1, count).astype(np.int32)
    return jnp.broadcast_to(even, (rows, count))

  def draw(key):
    return jax.lax.top_k(jax.random.uniform(key, (places,)), count)[1]

  return draws(batch, seed, draw)


def dpace_weights(probability: Array, smoothing: float) -> Array:
  """Returns D-PACE's weights [..., K] of levels (arXiv:2605.18810).

  Of level j, the sum over k >= j of the products of smoothed probabilities up
  to k: how much the expected accepted length depends on it. Not differentiated.

  Args:
    probability: [..., K] q of the text's tokens, 0 of those not drafted.
    smoothing: a of (1 - a) q + a.
  """
  right = (1 - smoothing) * probability + smoothing
  reached = jnp.cumprod(right, axis=-1)
  weights = jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)
  return jax.lax.stop_gradient(weights)


def loss_of_output(
  head: BlockHead,
  loss: Loss,
  net: PyTree,
  target: PyTree,
  batch: dict[str, Array],
  output: ModelOutput,
  goals: Aim,
  measure: bool = True,
  seed: int = 0,
) -> tuple[Array, dict[str, Array]]:
  """Computes loss and measures from the target's output.

  Measures: acceptance_j and agreement_j as of drafting.objective, with the text
  as prefix; accepted_length, the draft tokens that a round would have accepted
  at temperature 1 had it drafted the text: the mean of sum_j prod_{i <= j}
  acceptance; confidence_error, how far the confidence is from the acceptance;
  candidate_recall, how often the target's likeliest token is a candidate of a
  selector.

  Args:
    target: weights of the target.
    batch: tokens [B, T+1], and the addresses step and row [B].
    output: of the target on tokens[:, :-1].
    goals: what it says there, draft_losses.aim.
  """
  tokens, options = batch["tokens"], loss.block or BlockLoss()
  if "step" not in batch:  # D-PACE's weights grow with what is measured
    options = dataclasses.replace(options, weighting="decay")
  levels = head.head_config.levels
  anchors = anchors_of(batch, options.anchors, levels, seed)
  text = tokens[:, :-1]
  target_weights = draft_heads.target_weights_of(
    Params(target, draft_heads.weights_of(head, net, target))
  )
  context = context_of(head, net, output)

  def of_anchors(anchors):
    # Entry k is drafted after position anchor + k of the text.
    goal = goals.at(anchors[:, :, None] + jnp.arange(levels)[None, None])
    labels = jnp.maximum(goal.best, 0)
    unrolled = unroll(head, net, target_weights, text, context, anchors, labels)
    log_probs = jax.nn.log_softmax(unrolled.logits)
    base, measures = jax.nn.log_softmax(unrolled.base), {}
    if unrolled.selection is None:
      share = _base_weight(options, batch)
      parts = [_of_draft(loss, options, log_probs, goal, 1 - share)]
      if options.base_weight:
        parts.append(_of_draft(loss, options, base, goal, share))
    else:  # tokens that are no candidate have probability 0, so the divergence
      # is that of the slots' own distribution
      parts = [_of_draft(loss, options, base, goal)]
      entropy, is_candidate = unrolled.selection
      draftable = goal.best >= 0
      entropy = jnp.where(draftable, entropy, 0.0)
      recalled = (is_candidate & draftable).astype(jnp.float32)
      right, weight = recalled * jnp.exp(-entropy), options.selector_weight
      parts.append(_weighted(loss, options, entropy, right, weight))
      measures["candidate_recall"] = jnp.mean(recalled)
    accepted = 1 - draft_losses.rejected(log_probs, goal)
    if unrolled.confidence is not None:
      aimed = jax.lax.stop_gradient(jnp.clip(accepted, 0, 1))
      entropy = optax.losses.sigmoid_binary_cross_entropy(
        unrolled.confidence.astype(jnp.float32), aimed
      )
      right, weight = _right(log_probs, goal), options.confidence_weight
      parts.append(_weighted(loss, options, entropy, right, weight))
      error = jnp.abs(jax.nn.sigmoid(unrolled.confidence) - aimed)
      measures["confidence_error"] = jnp.mean(error)
    agree = jnp.argmax(log_probs, axis=-1) == goal.best
    for level in range(levels):
      for name, value in (("acceptance", accepted), ("agreement", agree)):
        value = jnp.mean(value[:, :, level].astype(jnp.float32))
        measures[f"{name}_{level + 1}"] = value
    lengths = jnp.sum(jnp.cumprod(accepted, axis=-1), axis=-1)
    measures["accepted_length"] = jnp.mean(lengths)
    return jnp.stack(parts), measures if measure else {}

  count = anchors.shape[1]
  at_once = options.at_once or count
  if at_once >= count:
    sums, measures = of_anchors(anchors)
  else:
    few = jax.checkpoint(of_anchors)
    groups, rest = divmod(count, at_once)
    pieces = jnp.split(anchors[:, : count - rest], groups, axis=1)
    sums, measures = jax.lax.map(few, jnp.stack(pieces))
    sums, measures = jnp.sum(sums, axis=0), jax.tree.map(jnp.mean, measures)
    if rest:
      more, others = few(anchors[:, -rest:])
      sums += more
      measures = optax.incremental_update(others, measures, rest / count)
  return jnp.sum(sums[:, 0] / sums[:, 1]), measures


def _base_weight(options: BlockLoss, batch: dict[str, Array]) -> Array | float:
  """Returns the weight of slots without their successor in a step.

  Evaluation has no step: there it is that of the end.
  """
  if not options.base_steps:
    return options.base_weight
  if "step" not in batch:
    return 0.0
  done = jnp.mean(batch["step"].astype(jnp.float32)) / options.base_steps
  return options.base_weight * jnp.maximum(0.0, 1.0 - done)


def _of_draft(
  loss: Loss,
  options: BlockLoss,
  log_probs: Array,
  goal: Aim,
  share: Array | float = 1.0,
) -> Array:
  """Returns `_weighted` of a draft's loss, with cross-entropy on the text."""
  text = draft_losses.text_loss(log_probs, goal)
  value = loss.token_weight * draft_losses.token_loss(
    loss.divergence, log_probs, goal
  )
  value += options.cross_entropy_weight * text
  return _weighted(loss, options, value, _right(log_probs, goal), share)


def _right(log_probs: Array, goal: Aim) -> Array:
  """Returns the probability [B, A, K] of the text's tokens."""
  text = draft_losses.text_loss(log_probs, goal)
  return jnp.where(goal.label >= 0, jnp.exp(-text), 0.0)


def _weighted(
  loss: Loss,
  options: BlockLoss,
  value: Array,
  right: Array,
  share: Array | float,
) -> Array:
  """Returns the sum of value [B, A, K] with the weights of its levels, times
  `share`, and what to divide it by: [2].

  That depends on sizes alone, so that parts of a batch make up the whole: the
  sum of decaying weights; of D-PACE's, which grow as a draft improves, the
  number of values.

  Args:
    right: [B, A, K] probability of the tokens that are aimed at, of which
      D-PACE's weights are: the text's, or of a selector the target's likeliest.
  """
  if options.weighting == "dpace":
    weights = dpace_weights(right, options.smoothing)
    count = jnp.float32(value.size)
  else:
    weights = loss.decay ** jnp.arange(value.shape[2], dtype=jnp.float32)
    weights = jnp.broadcast_to(weights, value.shape)
    count = jnp.sum(weights)
  return jnp.stack([share * jnp.sum(weights * value), count])
