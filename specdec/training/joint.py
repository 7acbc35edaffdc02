"""Objectives that train a target jointly with a drafter or early exits.

Params are {'target': weights} and, with a draft head, 'drafter': its net. The
measure 'cross_entropy' is always the target's, in nats per token, so that runs
of different kinds compare. The auxiliary loss has no stop_gradient: it reaches
the target through its hidden states and, as in the papers, through shared
embedding and head (DeepSeek-V3 MTP, arXiv:2412.19437; Medusa-2,
arXiv:2401.10774; LayerSkip, arXiv:2404.16710).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.drafters.heads.draft_head import DraftHead
from specdec.drafters.heads.head_config import HeadConfig
from specdec.training import draft_losses, drafting
from specdec.training.data import draws
from specdec.training.objective import (
  Objective,
  language_model,
  text_cross_entropy,
)
from specdec.training.options import check_range
from specdec.types import Array, Model, PyTree


@dataclasses.dataclass(frozen=True)
class LayerSkip:
  """Hyperparameters of LayerSkip (arXiv:2404.16710)."""

  dropout: float = 0.1  # p_max: of the last layer, at the last step
  exit_scale: float = 0.2  # e_scale: weight of the exits below the last layer
  # R: at step t the layers t mod R, t mod R + R, ... have an exit, and the last
  # one always has.
  rotation: int = 1

  def __post_init__(self):
    check_range(self, "dropout", 0, 1)
    check_range(self, "exit_scale", 0)
    check_range(self, "rotation", 1)


def check(head_config: HeadConfig, loss: drafting.Loss) -> None:
  """Raises ValueError for a head or a loss that is not trained jointly.

  Of heads, those that draft all levels in one pass; of losses, what is not
  cross-entropy on the text, or uses hidden states, which change together with
  the target.
  """
  if head_config.block or head_config.parallel:
    raise ValueError(
      f"head_config.kind = {head_config.kind!r}: a head that drafts all levels "
      "in one pass is trained on a frozen target, not jointly with it. Train "
      "the target first (configs/train/joint.py:none), then the head with "
      "`target`, that checkpoint, and without `model` "
      "(configs/train/drafter.py); or take a kind that drafts level by level, "
      "such as mtp, prophet or medusa"
    )
  if loss.divergence != "cross_entropy" or loss.feature_weight:
    raise ValueError(
      f"divergence = {loss.divergence!r}, feature_weight = "
      f"{loss.feature_weight}: joint training needs divergence = "
      "'cross_entropy' and feature_weight = 0"
    )


def target_only(model: Model) -> Objective:
  """Builds the objective of the target without an auxiliary loss."""
  loss = language_model(model)
  return lambda params, frozen, tokens: loss(params["target"], frozen, tokens)


def with_drafter(
  model: Model,
  draft_head: DraftHead,
  loss: drafting.Loss,
  measure: bool = False,
) -> Objective:
  """Builds cross-entropy plus loss.token_weight times that of a draft head.

  The draft head's cross-entropy is that of drafting.loss_of_output, a mean over
  levels with weights decay^j; the measure 'auxiliary' is this mean.

  Args:
    draft_head: with drafters.heads.unroll.growing as its placement.
    measure: also returns acceptance and agreement of each level.

  Raises:
    ValueError: of `check`.
  """
  check(draft_head.head_config, loss)
  unweighted = dataclasses.replace(loss, token_weight=1.0)

  def objective(params, frozen, tokens):
    del frozen
    target = params["target"]
    output, _ = model.apply(
      target, tokens[:, :-1], None, features=draft_head.features
    )
    cross_entropy = text_cross_entropy(output.logits, tokens)
    goal = draft_losses.aim(draft_head, output.logits, tokens[:, 1:])
    auxiliary, measures = drafting.loss_of_output(
      draft_head,
      unweighted,
      params["drafter"],
      target,
      {"tokens": tokens},
      output,
      goal,
      measure,
    )
    return cross_entropy + loss.token_weight * auxiliary, {
      "cross_entropy": cross_entropy,
      "auxiliary": auxiliary,
      **measures,
    }

  return objective


def layer_skip(
  model: Model, settings: LayerSkip, steps: int, seed: int
) -> Objective:
  """Builds LayerSkip's objective: layer dropout and early-exit losses.

  Takes batches of data.Numbered. Each row of the batch drops layers
  independently and without rescaling. The measure 'auxiliary' is the weighted
  loss of the exits below the last layer.

  Args:
    steps: of the whole run, over which the dropout rates increase.
    seed: of the dropout.

  Raises:
    ValueError: the target has fewer than two layers.
  """
  num_layers, rotation = _check_layers(model), settings.rotation
  num_exits = -(-(num_layers - 1) // rotation)  # below the last layer, at most

  def objective(params, frozen, batch):
    del frozen
    target, tokens = params["target"], batch["tokens"]
    step = batch["step"][0]
    rates = drop_rates(num_layers, settings.dropout, step, steps)
    keep = _uniform(seed, batch, num_layers) >= rates[None]
    residuals = _residuals(model, target, tokens[:, :-1], keep)
    layer = step % rotation + rotation * jnp.arange(num_exits)
    exists = layer < num_layers - 1
    layer = jnp.minimum(layer, num_layers - 1)
    active = jnp.zeros((num_layers,)).at[layer].set(1.0).at[-1].set(1.0)
    weights = exit_weights(num_layers, settings.exit_scale, active)
    below = jnp.stack(residuals[:-1])
    auxiliary = 0.0
    for i in range(num_exits):  # a static number of heads at every step
      # An exit past the last layer repeats another one with weight zero.
      residual = below[jnp.minimum(layer[i], num_layers - 2)]
      value = _exit_loss(model, target, tokens, residual)
      auxiliary += jnp.where(exists[i], weights[layer[i]], 0.0) * value
    last = _exit_loss(model, target, tokens, residuals[-1])
    return weights[-1] * last + auxiliary, {
      "cross_entropy": last,
      "auxiliary": auxiliary,
    }

  return objective


def exit_losses(model: Model) -> Objective:
  """Builds the evaluation of a LayerSkip target, without dropout.

  Measures: exit_E, cross-entropy after layers 0 .. E - 1.

  Raises:
    ValueError: the target has fewer than two layers.
  """
  _check_layers(model)

  def objective(params, frozen, tokens):
    del frozen
    target = params["target"]
    *early, last = (
      _exit_loss(model, target, tokens, residual)
      for residual in _residuals(model, target, tokens[:, :-1], None)
    )
    early = {f"exit_{i}": value for i, value in enumerate(early, 1)}
    return last, {"cross_entropy": last, **early}

  return objective


def with_target_loss(objective: Objective) -> Objective:
  """Replaces the loss by the target's, which selects 'best' and compares."""

  def evaluation(params, frozen, tokens):
    _, measures = objective(params, frozen, tokens)
    return measures["cross_entropy"], measures

  return evaluation


def drop_rates(
  num_layers: int, dropout: float, step: Array | int, steps: int
) -> Array:
  """Returns the dropout rate of each layer at `step`, p_max S(t) D(l): [L]."""
  layer = jnp.arange(num_layers) / max(num_layers - 1, 1)
  time = jnp.asarray(step) / max(steps - 1, 1)
  return dropout * (jnp.exp2(time) - 1) * (jnp.exp2(layer) - 1)


def exit_weights(num_layers: int, scale: float, active: Array) -> Array:
  """Returns the normalized weight of the loss after each layer, [L].

  Computes e~ of LayerSkip's section 4.1.2: scale * (0 + 1 + .. + l) after layer
  l, and L - 1 more after the last one.

  Args:
    active: [L] 1.0 for layers with an exit, else 0.0.
  """
  last = num_layers - 1
  layer = jnp.arange(num_layers)
  weights = scale * layer * (layer + 1) / 2
  weights = weights.at[last].set(last + scale * (last - 1) * last / 2) * active
  return weights / jnp.sum(weights)


def _check_layers(model: Model) -> int:
  if model.num_layers < 2:
    raise ValueError(
      f"the target has {model.num_layers} layers; an early exit needs at "
      "least 2"
    )
  return model.num_layers


def _uniform(seed: int, batch: dict[str, Array], num_layers: int) -> Array:
  """Draws [B, L] uniform noise."""
  return draws(batch, seed, lambda key: jax.random.uniform(key, (num_layers,)))


def _residuals(
  model: Model, params: PyTree, text: Array, keep: Array | None
) -> list[Array]:
  """Returns the residual stream after every layer, each [B, T, M].

  Args:
    keep: [B, L] bool, False where a row drops a layer; None: all layers run.
  """
  residual, residuals = None, []
  for i in range(model.num_layers):
    output, _ = model.apply(
      params,
      text,
      None,
      start=i,
      stop=i + 1,
      hidden=residual,
      head=False,
      features=(i, i + 1),
    )
    before, residual = output.features
    if keep is not None:
      residual = jnp.where(keep[:, i, None, None], residual, before)
    residuals.append(residual)
  return residuals


def _exit_loss(
  model: Model, params: PyTree, tokens: Array, residual: Array
) -> Array:
  """Returns the cross-entropy of final norm and head on a residual stream."""
  output, _ = model.apply(
    params, tokens[:, :-1], None, start=model.num_layers, hidden=residual
  )
  return text_cross_entropy(output.logits, tokens)
