"""A head's vocabulary projection and the sizes of its numbers, for its cost."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec.drafters.heads.block_head import AnyHead
from specdec.drafters.heads.draft_head import GROUP
from specdec.models import params
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat
from specdec.types import PyTree


class Projection(NamedTuple):
  """The weights of a head's vocabulary projection, by where they lie.

  Rows of the target's projection are read in place, unless the head drafts from
  a smaller vocabulary: then it holds a copy of them. Of the whole vocabulary
  every chip reads its part, of fewer tokens all.

  Attributes:
    shared: the target's weights that the head reads.
    copied: those that it holds a copy of.
    split: weights of its own, of the whole vocabulary.
    reduced: weights of its own, of fewer tokens.
    own_size: bytes of a weight of its own.
    target_size: bytes of a weight that is shared or copied.
    num_tokens: how many it can draft.
    vocab_size: of the target.
  """

  shared: int
  copied: int
  split: int
  reduced: int
  own_size: float
  target_size: float
  num_tokens: int
  vocab_size: int

  @property
  def num_weights(self) -> int:
    return self.shared + self.copied + self.split + self.reduced

  @property
  def copied_bytes(self) -> float:
    return self.target_size * self.copied

  @property
  def whole_bytes(self) -> float:
    """What every chip reads in full."""
    return self.own_size * self.reduced + self.copied_bytes

  def step_fields(self) -> dict[str, Any]:
    """Returns the fields of StepCost that it alone fills, logits left out."""
    return dict(
      projected_flops=2 * (self.reduced + self.copied),
      split_bytes=self.own_size * self.split,
      split_flops=2 * self.split,
      target_bytes=self.target_size * self.shared,
      target_flops=2 * self.shared,
    )

  def logits(self, spread: bool = True) -> dict[str, int]:
    """Returns the fields of StepCost that say how many logits a token has.

    Of fewer tokens than the target's, every chip computes all of them, and
    gathers its part of the whole vocabulary from them if they are spread.
    """
    if not self.reduced and not self.copied:
      return {"split_logits": self.vocab_size}
    return {
      "logits": self.num_tokens,
      "split_logits": self.vocab_size if spread else 0,
    }


def of(
  head: AnyHead, target: TransformerConfig, form: WeightFormat | None = None
) -> Projection:
  """Returns the vocabulary projection of a head.

  Args:
    form: of the head's matrices, if they are integers.
  """
  config, reduces = head.head_config, head.ids is not None
  num_tokens = len(head.ids) if reduces else head.vocab_size
  own_size = weight_size(target, form)
  target_size = params.head_weight_size(target)
  shared = copied = split = reduced = 0
  if config.head == "own" and reduces:
    reduced = num_tokens * config.width
  elif config.head == "own":
    split = num_tokens * config.width
  elif reduces:
    copied = num_tokens * target.width
    if form:
      target_size = own_size
    elif target_size < 2:  # rows of integers are copied as float32
      target_size = 4
  else:
    shared = num_tokens * target.width
  return Projection(
    *(shared, copied, split, reduced, own_size, target_size),
    *(num_tokens, head.vocab_size),
  )


def item_size(target: TransformerConfig) -> int:
  """Returns the bytes of a number of a head, which has the target's dtype: of
  its weights, its KV and the hidden states that it keeps."""
  return jnp.dtype(target.dtype).itemsize


def weight_size(target: TransformerConfig, form: WeightFormat | None) -> float:
  """Returns the bytes of a weight of a head's matrices, with its scale."""
  if form is None:
    return item_size(target)
  return dataclasses.replace(form, group=form.group or GROUP).weight_size


def num_weights(net: PyTree) -> int:
  """Returns a head's number of weights, the target's left out."""
  return sum(leaf.size for leaf in jax.tree.leaves(net))
