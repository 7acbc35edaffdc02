"""What a learned drafter is trained on: its guesses after the text's own words.

The target is frozen. Every position of a text is the root of a draft
(learned/unroll.py); level j counts decay^j. A law over fewer tokens than the
target's is held against what the target gives these tokens, the rest being
what it can never get right.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.learned import cell as cells
from specdec.learned.cell import Cell
from specdec.learned.unroll import unroll, valid
from specdec.training import losses
from specdec.training.objective import Objective
from specdec.types import Array, Model, ModelOutput, Params, PyTree

LOSSES = ("cross_entropy", "forward_kl", "reverse_kl", "total_variation")


@dataclasses.dataclass(frozen=True)
class Loss:
  """How guesses are judged.

  Attributes:
    law: one of LOSSES; cross_entropy is that of the text's next token, the
      others are distances from the target's law.
    law_weight: of that.
    feature_weight: of the smooth L1 distance between streams and the target's
      hidden states (EAGLE alone).
    decay: weight of a level against the one before it.
  """

  law: str = "forward_kl"
  law_weight: float = 1.0
  feature_weight: float = 0.0
  decay: float = 0.8

  def __post_init__(self):
    if self.law not in LOSSES:
      raise ValueError(
        f"law {self.law!r} is unknown; known: {', '.join(LOSSES)}"
      )
    for name in ("law_weight", "feature_weight", "decay"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 0")


def objective(
  cell: Cell, target: Model, loss: Loss, measure: bool = True
) -> Objective:
  """(net, target's weights, tokens [B, T+1]) -> (loss, measures).

  In the tokens' place it takes what training/hidden.py keeps of them as well.

  Measures, level by level from 1: acceptance_j, the probability that a guess
  drawn at temperature 1 is kept, and agreement_j, the same at temperature 0,
  after the text's own words. Decoding is after its own guesses, and is
  measured by decoding. Without `measure` there are none, and a step is quicker.
  """
  if loss.feature_weight and cell.recipe.kind != "eagle":
    raise ValueError(
      f"feature_weight: streams of {cell.recipe.kind} are no hidden states"
    )

  num_layers = len(jax.eval_shape(lambda: target.init_cache(1, 1)).layers)

  def aim(net, frozen, tokens):
    if isinstance(tokens, dict):  # but for the norm and the head, it was run
      states, tokens = tokens, tokens["tokens"]
      output, _ = target.apply(
        frozen, tokens[:, :-1], None, start=num_layers, hidden=states["last"]
      )
      output = output._replace(features=states["features"])
    else:
      output, _ = target.apply(
        frozen, tokens[:, :-1], None, features=cell.features
      )
    output = jax.lax.stop_gradient(output)
    return of_output(cell, loss, net, frozen, tokens, output, measure)

  return aim


def of_output(
  cell: Cell,
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
  size, levels = text.shape[1], cell.recipe.levels
  lent = cells.lend(Params(target, cells.weights_of(cell, net, target)))
  goal = jax.nn.log_softmax(output.logits)
  best = jnp.argmax(goal, axis=-1)
  place = jnp.arange(cell.vocab_size)
  if cell.ids is not None:
    goal = goal[..., cell.ids]
    place = (
      jnp.full((cell.vocab_size,), -1)
      .at[cell.ids]
      .set(jnp.arange(len(cell.ids)))
    )
  given = jnp.exp(goal)
  never = 1 - jnp.sum(given, axis=-1)  # the rest: what it cannot guess
  spent = jnp.sum(given * goal, axis=-1)
  logits, streams = unroll(cell, net, lent, text, output, levels)
  total, measures = 0.0, {}
  for level in range(levels):
    there = valid(size, level)[None].astype(jnp.float32)
    count = text.shape[0] * jnp.sum(there)

    def mean(x, there=there, count=count):
      return jnp.sum(x * there) / count

    law = jax.nn.log_softmax(logits[level])
    if measure or loss.law == "total_variation":
      refused = losses.total_variation(law, goal) + never / 2
    if loss.law == "cross_entropy":
      known = place[after] >= 0
      value = losses.cross_entropy(law, jnp.maximum(place[after], 0))
      value = jnp.where(known, value, 0.0)
    elif loss.law == "total_variation":
      value = refused
    elif loss.law == "reverse_kl":
      value = losses.reverse_kl(law, goal)
    else:  # forward KL, its one half known before
      value = spent - jnp.sum(given * law, axis=-1)
    here = loss.law_weight * mean(value)
    if loss.feature_weight:
      off = streams[level] - output.hidden
      smooth = jnp.where(jnp.abs(off) < 1, 0.5 * off**2, jnp.abs(off) - 0.5)
      here += loss.feature_weight * mean(jnp.mean(smooth, axis=-1))
    total += loss.decay**level * here
    if measure:
      agree = jnp.argmax(law, axis=-1) == place[best]
      measures[f"acceptance_{level + 1}"] = 1 - mean(refused)
      measures[f"agreement_{level + 1}"] = mean(agree.astype(jnp.float32))
  weight = sum(loss.decay**level for level in range(levels))
  return total / weight, measures
