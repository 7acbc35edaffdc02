"""A target and its drafter on chips: rounds, speedup, memory.

speedup = E[tokens per round] * baseline round / round(k)
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from specdec.roofline import drafter_cost, theory
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import (
  NOTHING,
  Overhead,
  Round,
  deployment_of,
  round_cost,
)
from specdec.types import DrafterCost

USABLE = 0.9  # of a chip's memory; the rest is for programs and temporaries


@dataclasses.dataclass(frozen=True)
class TargetDraftPair:
  """A target and its drafter on chips.

  Attributes:
    target: verifies.
    draft: where the decoder runs that drafts; None: on the target's chips, if
      `drafter` has one.
    overhead, baseline_overhead: of a speculative round, of a baseline round.
    drafter: what drafting costs; None: `draft` is an independent model, or
      without one drafting is free (prompt lookup).
  """

  target: Deployment
  draft: Deployment | None = None
  overhead: Overhead = NOTHING
  baseline_overhead: Overhead = NOTHING
  drafter: DrafterCost | None = None

  def __post_init__(self):
    if (
      self.draft and self.draft.shape.vocab_size != self.target.shape.vocab_size
    ):
      raise ValueError(
        f"draft and target have vocabularies of {self.draft.shape.vocab_size} "
        f"and {self.target.shape.vocab_size}; they must share one"
      )

  @functools.cached_property
  def cost(self) -> DrafterCost:
    """What the drafter holds and reads."""
    if self.drafter is not None:
      return self.drafter
    if self.draft is None:
      return drafter_cost.lookup()
    return drafter_cost.model(self.draft.shape, self.draft.weights)

  def baseline(self, batch: float, context: float) -> Round:
    """Prices a round of autoregressive decoding."""
    return self._price(0, batch, context)

  def round(self, batch: float, k: int, context: float) -> Round:
    """Prices a round with a chain of k draft tokens; k = 0: the baseline."""
    return self._price(k, batch, context)

  def tree_round(
    self, batch: float, levels: Sequence[int], context: float
  ) -> Round:
    """Prices a round whose draft is a tree with levels[d] nodes at depth d + 1.

    The overhead is that of a chain of the same depth.
    """
    return self._price(tuple(levels), batch, context)

  def _price(self, draft, batch, context) -> Round:
    return round_cost(
      self.target,
      self.cost,
      draft,
      batch,
      context,
      draft_deployment=self.draft,
      overhead=self.overhead if draft else self.baseline_overhead,
    )

  def speedup(
    self, batch: float, context: float, prefix_acceptance: Sequence[float]
  ) -> float:
    """Returns the speedup over autoregressive decoding, k = len(curve)."""
    baseline = self.baseline(batch, context).seconds
    seconds = self.round(batch, len(prefix_acceptance), context).seconds
    return theory.expected_tokens(prefix_acceptance) * baseline / seconds

  def memory(self, batch: float, slots: float) -> dict[str, float]:
    """Returns bytes per chip by use, for `slots` cached positions a row.

    Raises:
      ValueError: what the drafter holds is unknown.
    """
    parts = {
      "target weights": self.target.weight_bytes,
      "target cache": self.target.cache_bytes(batch, slots),
    }
    cost = self.cost
    if not cost.is_known:
      raise ValueError("what this drafter holds in memory is unknown")
    decoder = self.draft or deployment_of(self.target, cost)
    if cost.shape is not None and not cost.shares_target:
      parts["draft weights"] = decoder.weight_bytes
      parts["draft cache"] = decoder.cache_bytes(batch, slots)
    elif cost.weight_bytes or cost.row_bytes or cost.position_bytes:
      rows = math.ceil(batch / self.target.replicas)
      parts["draft weights"] = cost.weight_bytes
      parts["draft cache"] = rows * (
        cost.row_bytes + slots * cost.position_bytes
      )
    return parts

  def check_memory(self, batch: float, slots: float) -> None:
    """Checks that weights and caches fit into a chip.

    Raises:
      ValueError: they do not; names the excess and the largest part.
    """
    sizes, chip = self.memory(batch, slots), self.target.chip
    total, room = sum(sizes.values()), USABLE * chip.memory
    if total > room:
      gib = 2**30
      parts = ", ".join(f"{name} {x / gib:.2f}" for name, x in sizes.items())
      worst = max(sizes, key=sizes.get)
      raise ValueError(
        f"batch {batch:g} at {slots:g} tokens needs {total / gib:.2f} GiB of "
        f"a {chip.name}, {(total - room) / gib:.2f} more than the "
        f"{room / gib:.2f} that can be used; {worst} take most ({parts})"
      )
