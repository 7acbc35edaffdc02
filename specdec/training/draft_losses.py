"""Losses of draft tokens against the target's distribution, by name.

A head with a reduced vocabulary is compared with the target's probabilities of
those tokens; the remaining probability mass always counts as rejected.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec.drafters.heads.draft_head import (
  drafted_rows,
  projection,
  shared_score,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.head_kinds import KINDS
from specdec.sharding import Placement
from specdec.training import objective as objectives
from specdec.training.objective import LOSSES
from specdec.training.options import check_range
from specdec.types import Array, PyTree
from specdec.utils.spelling import check_choice

WEIGHTINGS = ("decay", "dpace")
AT_ONCE = 64  # positions whose logits over a whole vocabulary exist at a time


@dataclasses.dataclass(frozen=True)
class BlockLoss:
  """What the loss of block drafters has beyond that of every head."""

  anchors: int = 32  # positions of a sequence at which a block begins
  at_once: int = 0  # of them whose logits exist at a time; 0: all
  # Of the levels: 'decay', Loss.decay^j, or 'dpace', how much longer a draft
  # would be accepted for being right there (D-PACE, arXiv:2605.18810).
  weighting: str = "decay"
  smoothing: float = 0.5  # of D-PACE
  cross_entropy_weight: float = 0.0  # on the text, added to the divergence
  # lambda of (1 - lambda) L + lambda L_base, the same loss without the
  # successor's part (Domino, arXiv:2605.29707).
  base_weight: float = 0.0
  base_steps: int = 0  # in which base_weight falls to 0; 0: it stays
  confidence_weight: float = 0.0  # of the confidence head's cross-entropy
  # Of a selector's cross-entropy on the target's likeliest token.
  selector_weight: float = 0.0

  def __post_init__(self):
    check_range(self, "anchors", 1, prefix="loss.block.")
    weights = "cross_entropy", "confidence", "selector"
    names = (f"{name}_weight" for name in weights)
    for name in ("at_once", "base_steps", *names):
      check_range(self, name, 0, prefix="loss.block.")
    for name in ("smoothing", "base_weight"):
      check_range(self, name, 0, 1, prefix="loss.block.")
    check_choice("loss.block.weighting", self.weighting, WEIGHTINGS)


@dataclasses.dataclass(frozen=True)
class TokenDrop:
  """How many mask slots of a sequence are trained: PARD's conditional drop.

  Level j has slots in the share max(keep^j, least) of the rounds, those of the
  level before among them (arXiv:2504.18583, section 3.3). Level 0 has all.
  """

  keep: float = 0.7
  least: float = 0.2

  def __post_init__(self):
    for name in ("keep", "least"):
      check_range(self, name, 0, 1)


@dataclasses.dataclass(frozen=True)
class Loss:
  """Loss of draft tokens."""

  # One of LOSSES; 'cross_entropy' is of the text's next token, the others are
  # divergences from the target's distribution.
  divergence: str = "forward_kl"
  token_weight: float = 1.0  # of the divergence
  # Of the smooth L1 distance between the head's hidden states and the target's.
  feature_weight: float = 0.0
  # Weight of a level relative to the previous one. Papers on blocks state gamma
  # of exp(-(j - 1) / gamma): decay = exp(-1 / gamma).
  decay: float = 0.8
  block: BlockLoss | None = None  # of block drafters alone; None: its defaults
  drop: TokenDrop | None = None  # of peagle alone; None: its defaults

  def __post_init__(self):
    check_choice("divergence", self.divergence, LOSSES)
    for name in ("token_weight", "feature_weight"):
      check_range(self, name, 0)
    check_range(self, "decay", 0, 1)


def check(loss: Loss, head_config: HeadConfig) -> None:
  """Refuses a loss with options that a head has no use for, or that leaves a
  part of it untrained.

  Raises:
    ValueError: feature_weight with a kind that does not predict hidden states,
      options of one kind with another, or a weight without what it weighs.
  """
  kind, block = head_config.kind, head_config.block
  if loss.block and not block:
    raise ValueError(f"loss.block belongs to a block drafter, not to {kind}")
  if loss.drop and not head_config.parallel:
    raise ValueError(f"loss.drop belongs to peagle, not to {kind}")
  if loss.feature_weight and not KINDS[kind].predicts_hidden:
    raise ValueError(
      f"feature_weight = {loss.feature_weight}: a head of kind {kind!r} does "
      "not predict the target's hidden states; only 'eagle' does"
    )
  if head_config.levels > 1 and not loss.decay:  # D-PACE's too are evaluated
    raise ValueError(
      f"loss.decay = 0: of {head_config.levels} levels only the first would "
      "count"
    )
  if not block:
    if not loss.token_weight and not loss.feature_weight:
      raise ValueError(
        "loss.token_weight and loss.feature_weight are 0: nothing would be "
        "trained"
      )
    return
  options, successor = loss.block or BlockLoss(), block.successor
  for name, part, has in (
    ("confidence", "block.confidence = True", block.confidence),
    ("selector", "block.successor = 'selector'", successor == "selector"),
  ):
    weight = getattr(options, f"{name}_weight")
    if has and not weight:
      raise ValueError(
        f"loss.block.{name}_weight = {weight} with head_config.{part}: the "
        f"{name} would not be trained; set a weight above 0"
      )
    if weight and not has:
      raise ValueError(
        f"loss.block.{name}_weight = {weight} without head_config.{part}: "
        "there is nothing to train; set 0"
      )
  if not loss.token_weight and not options.cross_entropy_weight:
    raise ValueError(
      "loss.token_weight and loss.block.cross_entropy_weight are 0: the slots "
      "would not be trained"
    )
  if options.base_steps and not options.base_weight:
    raise ValueError(
      f"loss.block.base_steps = {options.base_steps} has no effect with "
      "base_weight = 0; set one above 0, or no steps"
    )
  if options.base_weight and successor in ("none", "selector"):
    raise ValueError(
      f"loss.block.base_weight = {options.base_weight} with "
      f"head_config.block.successor = {successor!r}: the slots' own "
      "distributions have the loss already; set 0"
    )
  if options.base_weight == 1 and not options.base_steps:
    raise ValueError(
      "loss.block.base_weight = 1 with base_steps = 0: the successor would not "
      "be trained; set a smaller weight, or steps in which it falls to 0"
    )


class Aim(NamedTuple):
  """What a target says after each token [...], in a head's n tokens."""

  log_probs: Array  # [..., n]
  negative_entropy: Array  # [...] of these tokens
  uncovered: Array  # [...] mass of tokens that the head cannot draft
  best: Array  # [...] its likeliest token, -1 where the head cannot draft it
  label: Array  # [...] the text's next token; -1 likewise

  def at(self, index: Array) -> "Aim":
    """Returns positions index [B, any] of an Aim of [B, T]."""
    take = jax.vmap(lambda row, places: row[places])
    return jax.tree.map(lambda x: take(x, index), self)


def aim(head, logits: Array, labels: Array) -> Aim:
  """Returns what a head is compared with.

  Args:
    head: a DraftHead or BlockHead.
    logits: [B, T, V] of the target.
    labels: [B, T] the text's next tokens.
  """
  log_probs = jax.nn.log_softmax(logits)
  best = jnp.argmax(log_probs, axis=-1)
  if head.ids is not None:
    log_probs = log_probs[..., head.ids]
  return _aim(head, log_probs, best, labels)


def _aim(head, log_probs: Array, best: Array, labels: Array) -> Aim:
  """Returns the Aim of log-probabilities of tokens that a head can draft."""
  number = jnp.arange(head.vocab_size)  # of a token; -1: not drafted
  if head.ids is not None:
    number = jnp.full_like(number, -1)
    number = number.at[head.ids].set(jnp.arange(len(head.ids)))
  probs = jnp.exp(log_probs)
  return Aim(
    log_probs,
    jnp.sum(probs * log_probs, axis=-1),
    1 - jnp.sum(probs, axis=-1),
    number[best],
    number[labels],
  )


def aim_of_hidden(
  head,
  params: PyTree,
  hidden: Array,
  labels: Array,
  place: Placement | None = None,
) -> Aim:
  """Returns `aim` of a target's last hidden states.

  Where a head drafts a reduced vocabulary, logits of the whole one, mostly the
  largest array of a step, exist for a few positions at a time.

  Args:
    params: of the target.
    hidden: [B, T, M] after its final norm.
    place: of the head on a mesh, whose devices project a part of its tokens
      each, as they do in the head.
  """
  table = projection(params)

  def of_part(hidden):
    logits = shared_score(table, head.target, hidden)
    return jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

  if head.ids is None:
    return aim(head, shared_score(table, head.target, hidden), labels)
  batch, length, width = hidden.shape
  spare = -length % AT_ONCE
  parts = jnp.pad(hidden, ((0, 0), (0, spare), (0, 0)))
  parts = parts.reshape(batch, -1, AT_ONCE, width).swapaxes(0, 1)
  total, best = (
    x.swapaxes(0, 1).reshape(batch, -1)[:, :length]
    for x in jax.lax.map(of_part, parts)
  )
  rows = drafted_rows(head.ids, params)
  if place is not None:
    rows = place(rows, *place.by_size(rows.shape))
  logits = shared_score(rows, head.target, hidden)
  return _aim(head, logits - total[..., None], best, labels)


def rejected(log_probs: Array, aim: Aim) -> Array:
  """Returns the probability [...] that a draft token is rejected."""
  distance = objectives.total_variation(log_probs, aim.log_probs)
  return distance + aim.uncovered / 2


def text_loss(log_probs: Array, aim: Aim) -> Array:
  """Returns the cross-entropy [...] on the text, 0 for tokens not drafted."""
  value = objectives.cross_entropy(log_probs, jnp.maximum(aim.label, 0))
  return jnp.where(aim.label >= 0, value, 0.0)


def token_loss(name: str, log_probs: Array, aim: Aim) -> Array:
  """Returns the loss [...] of that name, one of LOSSES."""
  if name == "cross_entropy":
    return text_loss(log_probs, aim)
  if name == "total_variation":
    return rejected(log_probs, aim)
  if name == "reverse_kl":
    return objectives.reverse_kl(log_probs, aim.log_probs)
  # Its first term is the same for all levels.
  forward_kl = aim.negative_entropy - jnp.sum(
    jnp.exp(aim.log_probs) * log_probs, axis=-1
  )
  if name == "forward_kl":
    return forward_kl
  distance = rejected(log_probs, aim)
  return objectives.mixed(forward_kl, distance)
