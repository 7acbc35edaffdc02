"""Training a target from scratch with a second loss beside its own.

Params are {'target': weights, 'drafter': a draft_head's net, where there is
one}, and every measure 'cross_entropy' is that of the target itself, in nats a
token: so runs of unlike kinds compare. Nothing is held back: the second loss
reaches the target through its hidden states, and, as in the papers, through
embedding and head wherever they are shared (DeepSeek-V3 MTP, arXiv:2412.19437;
Medusa-2, arXiv:2401.10774; LayerSkip, arXiv:2404.16710).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.drafters.heads.draft_head import DraftHead
from specdec.training import drafting, losses
from specdec.training.objective import Objective, language_model
from specdec.types import Array, Model, PyTree


@dataclasses.dataclass(frozen=True)
class LayerSkip:
  """How a target learns to end early.

  Attributes:
    dropout: p_max, how often a row leaves out the last layer at the last step.
    exit_scale: e_scale, what the exits below the last layer weigh.
    rotation: R; at step t the layers t mod R, t mod R + R, ... have an exit,
      and the last one always.
  """

  dropout: float = 0.1
  exit_scale: float = 0.2
  rotation: int = 1

  def __post_init__(self):
    if not 0 <= self.dropout <= 1:
      raise ValueError(f"dropout = {self.dropout}; it must be in 0..1")
    if self.exit_scale < 0:
      raise ValueError(f"exit_scale = {self.exit_scale}; it must be >= 0")
    if self.rotation < 1:
      raise ValueError(f"rotation = {self.rotation}; it must be >= 1")


def alone(model: Model) -> Objective:
  """The language model's own loss, with nothing beside it."""
  baseline = language_model(model)
  return lambda params, frozen, tokens: baseline(
    params["target"], frozen, tokens
  )


def with_drafter(
  model: Model,
  draft_head: DraftHead,
  loss: drafting.Loss,
  measure: bool = False,
) -> Objective:
  """Cross-entropy, and loss.law_weight times that of the drafter's draft
  tokens.

  The draft tokens are those of drafting.of_output, a mean over levels in which
  level j counts decay^j. 'auxiliary' is that mean, unweighted.

  Args:
    draft_head: made with learned.unroll.growing for a placement.
    measure: acceptance and agreement, level by level, as well.

  Raises:
    ValueError: the loss asks for something else than the text: a target that
      moves is no goal.
  """
  if loss.divergence != "cross_entropy" or loss.feature_weight:
    raise ValueError(
      f"divergence = {loss.divergence!r}, feature_weight = "
      f"{loss.feature_weight}: joint "
      "training is on the text itself, divergence = 'cross_entropy' and no "
      "features"
    )
  each = dataclasses.replace(loss, token_weight=1.0)

  def aim(params, frozen, tokens):
    del frozen
    target = params["target"]
    output, _ = model.apply(
      target, tokens[:, :-1], None, features=draft_head.features
    )
    text = _on_text(output.logits, tokens)
    overhead, measures = drafting.of_output(
      draft_head, each, params["drafter"], target, tokens, output, measure
    )
    measures = {"cross_entropy": text, "auxiliary": overhead, **measures}
    return text + loss.token_weight * overhead, measures

  return aim


def layer_skip(
  model: Model, num_layers: int, settings: LayerSkip, steps: int, seed: int
) -> Objective:
  """Layers left out at random, row by row, and losses at the exits.

  In the tokens' place it takes what data.Numbered serves. A row of the batch
  leaves out a layer as a whole; what is left out is not made up for by scaling.
  'auxiliary' is what the exits below the last layer add to the loss.

  Args:
    steps: of the whole run: layers are left out more and more often.
    seed: of what is left out.
  """
  _check_layers(num_layers)
  spread = settings.rotation
  count = -(-(num_layers - 1) // spread)  # exits below the last, at most

  def aim(params, frozen, batch):
    del frozen
    target, tokens = params["target"], batch["tokens"]
    step = batch["step"][0]
    rates = drop_rates(num_layers, settings.dropout, step, steps)
    kept = _draw(seed, batch, num_layers) >= rates[None]
    streams = _streams(model, target, tokens[:, :-1], num_layers, kept)
    at = step % spread + spread * jnp.arange(count)
    there = at < num_layers - 1
    at = jnp.minimum(at, num_layers - 1)
    on = jnp.zeros((num_layers,)).at[at].set(1.0).at[-1].set(1.0)
    weights = exit_weights(num_layers, settings.exit_scale, on)
    below = jnp.stack(streams[:-1])
    overhead = 0.0
    for i in range(count):  # so many heads and no more, whatever the step
      # Past the end the last of those below stands in, and weighs nothing.
      stream = below[jnp.minimum(at[i], num_layers - 2)]
      value = _at_exit(model, target, tokens, stream, num_layers)
      overhead += jnp.where(there[i], weights[at[i]], 0.0) * value
    text = _at_exit(model, target, tokens, streams[-1], num_layers)
    return weights[-1] * text + overhead, {
      "cross_entropy": text,
      "auxiliary": overhead,
    }

  return aim


def exits(model: Model, num_layers: int) -> Objective:
  """The target as it is used: every layer runs.

  Measures: exit_E, cross-entropy where layers 0 .. E - 1 alone have run.
  """
  _check_layers(num_layers)

  def aim(params, frozen, tokens):
    del frozen
    target = params["target"]
    streams = _streams(model, target, tokens[:, :-1], num_layers, None)
    *early, text = (
      _at_exit(model, target, tokens, stream, num_layers) for stream in streams
    )
    named = {f"exit_{i}": value for i, value in enumerate(early, 1)}
    return text, {"cross_entropy": text, **named}

  return aim


def evaluated(aim: Objective) -> Objective:
  """The same measures, the target's own loss for the loss.

  So 'best' is the best target, and held-out losses of all kinds mean the same.
  """

  def judge(params, frozen, tokens):
    _, measures = aim(params, frozen, tokens)
    return measures["cross_entropy"], measures

  return judge


def drop_rates(
  num_layers: int, dropout: float, step: Array | int, steps: int
) -> Array:
  """[L] how often each layer is left out at `step`: p_max S(t) D(l)."""
  layer = jnp.arange(num_layers) / max(num_layers - 1, 1)
  time = jnp.asarray(step) / max(steps - 1, 1)
  return dropout * (jnp.exp2(time) - 1) * (jnp.exp2(layer) - 1)


def exit_weights(num_layers: int, scale: float, on: Array) -> Array:
  """[L] what the loss behind each layer weighs, of those that are `on`; sum 1.

  e~ of LayerSkip's section 4.1.2: scale * (0 + 1 + .. + l) behind layer l, so
  nothing behind layer 0, and L - 1 more behind the last one.
  """
  last = num_layers - 1
  layer = jnp.arange(num_layers)
  weights = scale * layer * (layer + 1) / 2
  weights = weights.at[last].set(last + scale * (last - 1) * last / 2) * on
  return weights / jnp.sum(weights)


def _check_layers(num_layers: int) -> None:
  if num_layers < 2:
    raise ValueError(f"{num_layers} layers: an exit needs a layer behind it")


def _draw(seed: int, batch: dict[str, Array], num_layers: int) -> Array:
  """[B, L] uniform noise; its address is (seed, step, row of the batch)."""

  def of_row(step, row):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.uniform(jax.random.fold_in(key, row), (num_layers,))

  return jax.vmap(of_row)(batch["step"], batch["row"])


def _streams(
  model: Model, params: PyTree, text: Array, num_layers: int, kept: Array | None
) -> list[Array]:
  """The stream behind every layer, rows that leave it out passing it by.

  Args:
    kept: [B, L] bool; None: every layer runs.
  """
  stream, streams = None, []
  for i in range(num_layers):
    output, _ = model.apply(
      params,
      text,
      None,
      start=i,
      stop=i + 1,
      hidden=stream,
      head=False,
      features=(i, i + 1),
    )
    before, stream = output.features
    if kept is not None:
      stream = jnp.where(kept[:, i, None, None], stream, before)
    streams.append(stream)
  return streams


def _at_exit(
  model: Model, params: PyTree, tokens: Array, stream: Array, num_layers: int
) -> Array:
  """Cross-entropy where the target's norm and head read this stream."""
  output, _ = model.apply(
    params, tokens[:, :-1], None, start=num_layers, hidden=stream
  )
  return _on_text(output.logits, tokens)


def _on_text(logits: Array, tokens: Array) -> Array:
  divergence = jax.nn.log_softmax(logits)
  return jnp.mean(losses.cross_entropy(divergence, tokens[:, 1:]))
