"""What a learned drafter is trained on: its draft tokens after the text's own
words.

The target is frozen. Every position of a text is the root of a draft
(learned/unroll.py); level j counts decay^j. A distribution over fewer tokens
than the target's is held against what the target gives these tokens, the rest
being what it can never get right.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.draft_head import DraftHead
from specdec.drafters.heads.unroll import unroll, valid
from specdec.training import losses
from specdec.training.objective import Objective
from specdec.types import Array, Model, ModelOutput, Params, PyTree

LOSSES = ("cross_entropy", "forward_kl", "reverse_kl", "total_variation")


@dataclasses.dataclass(frozen=True)
class Loss:
  """How draft tokens are evaluated.

  Attributes:
    distribution: one of LOSSES; cross_entropy is that of the text's next token,
      the others are distances from the target's distribution.
    law_weight: of that.
    feature_weight: of the smooth L1 distance between streams and the target's
      hidden states (EAGLE alone).
    decay: weight of a level against the one before it.
  """

  divergence: str = "forward_kl"
  token_weight: float = 1.0
  feature_weight: float = 0.0
  decay: float = 0.8

  def __post_init__(self):
    if self.divergence not in LOSSES:
      raise ValueError(
        f"divergence {self.divergence!r} is unknown; known: {', '.join(LOSSES)}"
      )
    for name in ("token_weight", "feature_weight", "decay"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 0")


def objective(
  draft_head: DraftHead, target: Model, loss: Loss, measure: bool = True
) -> Objective:
  """(net, target's weights, tokens [B, T+1]) -> (loss, measures).

  In the tokens' place it takes what training/hidden.py keeps of them as well.

  Measures, level by level from 1: acceptance_j, the probability that a draft
    token
  drawn at temperature 1 is kept, and agreement_j, the same at temperature 0,
  after the text's own words. Decoding is after its own draft tokens, and is
  measured by decoding. Without `measure` there are none, and a step is quicker.
  """
  if loss.feature_weight and draft_head.head_config.kind != "eagle":
    raise ValueError(
      f"feature_weight: streams of {draft_head.head_config.kind} are no hidden "
      "states"
    )

  num_layers = target.num_layers

  def aim(net, frozen, tokens):
    if isinstance(tokens, dict):  # but for the norm and the head, it was run
      states, tokens = tokens, tokens["tokens"]
      output, _ = target.apply(
        frozen, tokens[:, :-1], None, start=num_layers, hidden=states["last"]
      )
      output = output._replace(features=states["features"])
    else:
      output, _ = target.apply(
        frozen, tokens[:, :-1], None, features=draft_head.features
      )
    output = jax.lax.stop_gradient(output)
    return of_output(draft_head, loss, net, frozen, tokens, output, measure)

  return aim


def of_output(
  draft_head: DraftHead,
  loss: Loss,
  net: PyTree,
  target: PyTree,
  tokens: Array,
  output: ModelOutput,
  measure: bool = True,
) -> tuple[Array, dict[str, Array]]:
  """The same, the target having been run.

  Args:
    output: of tokens[:, :-1], logits and all.
  """
  text, after = tokens[:, :-1], tokens[:, 1:]
  size, levels = text.shape[1], draft_head.head_config.levels
  target_weights = draft_heads.target_weights_of(
    Params(target, draft_heads.weights_of(draft_head, net, target))
  )
  goal = jax.nn.log_softmax(output.logits)
  best = jnp.argmax(goal, axis=-1)
  place = jnp.arange(draft_head.vocab_size)
  if draft_head.ids is not None:
    goal = goal[..., draft_head.ids]
    place = (
      jnp.full((draft_head.vocab_size,), -1)
      .at[draft_head.ids]
      .set(jnp.arange(len(draft_head.ids)))
    )
  given = jnp.exp(goal)
  never = 1 - jnp.sum(given, axis=-1)  # the rest: what it cannot draft token
  spent = jnp.sum(given * goal, axis=-1)
  logits, streams = unroll(
    draft_head, net, target_weights, text, output, levels
  )
  total, measures = 0.0, {}
  for level in range(levels):
    there = valid(size, level)[None].astype(jnp.float32)
    count = text.shape[0] * jnp.sum(there)

    def mean(x, there=there, count=count):
      return jnp.sum(x * there) / count

    divergence = jax.nn.log_softmax(logits[level])
    if measure or loss.divergence == "total_variation":
      refused = losses.total_variation(divergence, goal) + never / 2
    if loss.divergence == "cross_entropy":
      known = place[after] >= 0
      value = losses.cross_entropy(divergence, jnp.maximum(place[after], 0))
      value = jnp.where(known, value, 0.0)
    elif loss.divergence == "total_variation":
      value = refused
    elif loss.divergence == "reverse_kl":
      value = losses.reverse_kl(divergence, goal)
    else:  # forward KL, its one half known before
      value = spent - jnp.sum(given * divergence, axis=-1)
    here = loss.token_weight * mean(value)
    if loss.feature_weight:
      off = streams[level] - output.hidden
      smooth = jnp.where(jnp.abs(off) < 1, 0.5 * off**2, jnp.abs(off) - 0.5)
      here += loss.feature_weight * mean(jnp.mean(smooth, axis=-1))
    total += loss.decay**level * here
    if measure:
      agree = jnp.argmax(divergence, axis=-1) == place[best]
      measures[f"acceptance_{level + 1}"] = 1 - mean(refused)
      measures[f"agreement_{level + 1}"] = mean(agree.astype(jnp.float32))
  weight = sum(loss.decay**level for level in range(levels))
  return total / weight, measures
