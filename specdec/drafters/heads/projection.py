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
  a smaller vocabulary: then it holds a copy of them. Every chip reads its part.

  Attributes:
    shared: the target's weights that the head reads.
    copied: those that it holds a copy of.
    own: weights of its own.
    own_size: bytes of a weight of its own.
    target_size: bytes of a weight that is shared or copied.
    num_tokens: how many it can draft.
    num_reduced: the same, 0 if it can draft all.
    vocab_size: of the target.
  """

  shared: int
  copied: int
  own: int
  own_size: float
  target_size: float
  num_tokens: int
  num_reduced: int
  vocab_size: int

  @property
  def num_weights(self) -> int:
    return self.shared + self.copied + self.own

  @property
  def copied_bytes(self) -> float:
    return self.target_size * self.copied

  def step_fields(self) -> dict[str, Any]:
    """Returns the fields of StepCost that it alone fills, logits left out."""
    return dict(
      split_bytes=self.own_size * self.own + self.copied_bytes,
      split_flops=2 * (self.own + self.copied),
      target_bytes=self.target_size * self.shared,
      target_flops=2 * self.shared,
    )

  def logits(self, gathers: bool = True) -> dict[str, int]:
    """Returns the fields of StepCost that say how many logits a token has.

    Of fewer tokens than the target's, every chip gathers all of them, and takes
    its part of the whole vocabulary from them.

    Args:
      gathers: False: every chip computes all of them.
    """
    return {
      "split_logits": self.vocab_size,
      "gathered_logits" if gathers else "logits": self.num_reduced,
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
  shared = copied = own = 0
  if config.head == "own":
    own = num_tokens * config.width
  elif reduces:
    copied = num_tokens * target.width
    if form:
      target_size = own_size
    elif target_size < 2:  # rows of integers are copied as float32
      target_size = 4
  else:
    shared = num_tokens * target.width
  return Projection(
    *(shared, copied, own, own_size, target_size),
    *(num_tokens, num_tokens if reduces else 0, head.vocab_size),
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
