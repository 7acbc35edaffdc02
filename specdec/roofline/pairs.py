"""Prices a round of a target and its drafter on chips, and its speedup.

  round(k) = k draft passes + verification of k + 1 tokens + overhead
  speedup  = E[tokens per round] * baseline round / round(k)

The first draft pass takes two tokens a row, as the drafter catches up with its
last draft token (docs/design.md, rule 1); every other pass takes one.
"""

import collections
import dataclasses
from collections.abc import Sequence

from specdec.roofline import theory
from specdec.roofline.cost import Cost, Deployment, Term
from specdec.roofline.round_cost import NOTHING, Overhead, Round

USABLE = 0.9  # of a chip's memory; the rest is for programs and temporaries


def _tokens(n: int) -> str:
  return "1 token" if n == 1 else f"{n} tokens"


@dataclasses.dataclass(frozen=True)
class TargetDraftPair:
  """A target and its drafter on chips.

  Attributes:
    target: verifies.
    draft: runs the draft passes; None: drafting is free (prompt lookup).
    exit_layer: `draft` is the target's first layers: it adds no weights and no
      cache, and verification resumes at this layer.
    overhead, baseline_overhead: of a speculative round, of a baseline round.
    skips: `draft` is the target without some sublayers: it adds no weights and
      no cache, and verification runs every layer.
  """

  target: Deployment
  draft: Deployment | None = None
  exit_layer: int | None = None
  overhead: Overhead = NOTHING
  baseline_overhead: Overhead = NOTHING
  skips: bool = False

  @property
  def _separate(self) -> bool:
    """Whether the draft has weights and a cache apart from the target's."""
    shared = self.skips or self.exit_layer is not None
    return self.draft is not None and not shared

  def __post_init__(self):
    if (
      self.draft and self.draft.shape.vocab_size != self.target.shape.vocab_size
    ):
      raise ValueError(
        f"draft and target have vocabularies of {self.draft.shape.vocab_size} "
        f"and {self.target.shape.vocab_size}; they must share one"
      )

  def baseline(self, batch: float, context: float) -> Round:
    """Prices a round of autoregressive decoding."""
    cost = self.target.cost(batch, 1, context)
    overhead = self.baseline_overhead.seconds(batch, 0)
    return Round.make((("target, 1 token", 1, cost),), overhead)

  def round(self, batch: float, k: int, context: float) -> Round:
    """Prices a round with a chain of k draft tokens; k = 0: the baseline."""
    if k == 0:
      return self.baseline(batch, context)
    return self._round(batch, (1,) * k, k + 1, context)

  def tree_round(
    self, batch: float, levels: Sequence[int], context: float
  ) -> Round:
    """Prices a round whose draft is a tree with levels[d] nodes at depth d + 1.

    Every level but the last is a draft pass; commit compacts the accepted
    path's KV. The overhead is that of a chain of the same depth.
    """
    if not levels:
      return self.baseline(batch, context)
    frontiers = (1, *levels[:-1])
    base = self._round(batch, frontiers, 1 + sum(levels), context)
    path = 1 + len(levels)
    moved = 2 * self.target.cache_bytes(batch, path)
    if self._separate:
      moved += 2 * self.draft.cache_bytes(batch, path)
    seconds = moved / (self.target.efficiency.kv * self.target.chip.bandwidth)
    commit = Cost((Term("KV moved", moved, seconds=seconds),), seconds)
    return base._replace(parts=(*base.parts, ("commit", 1, commit)))

  def _round(self, batch, frontiers, nodes, context) -> Round:
    """Prices draft passes over `frontiers` tokens, then one over all nodes."""
    target, parts = self.target, []
    if self.draft is not None:
      # A drafter that reads the target's KV has nothing to catch up with.
      late = int(self._separate)
      passes = [frontiers[0] + late, *frontiers[1:]]
      for tokens, times in sorted(collections.Counter(passes).items()):
        cost = self.draft.cost(batch, tokens, context)
        parts.append((f"draft, {_tokens(tokens)}", times, cost))
    if self.exit_layer is not None:
      # The leaves have no KV in the first layers yet.
      first_layers = dataclasses.replace(self.draft, head=False)
      leaves = nodes - sum(frontiers)
      cost = first_layers.cost(batch, leaves, context)
      parts.append((f"first layers, {_tokens(leaves)}", 1, cost))
      target = dataclasses.replace(target, start=self.exit_layer)
    cost = target.cost(batch, nodes, context)
    parts.append((f"target, {_tokens(nodes)}", 1, cost))
    return Round.make(
      tuple(parts), self.overhead.seconds(batch, len(frontiers))
    )

  def speedup(
    self, batch: float, context: float, prefix_acceptance: Sequence[float]
  ) -> float:
    """Returns the speedup over autoregressive decoding, k = len(curve)."""
    baseline = self.baseline(batch, context).seconds
    seconds = self.round(batch, len(prefix_acceptance), context).seconds
    return theory.expected_tokens(prefix_acceptance) * baseline / seconds

  def memory(self, batch: float, slots: float) -> dict[str, float]:
    """Returns bytes per chip by use, for `slots` cached positions a row."""
    parts = {
      "target weights": self.target.weight_bytes,
      "target cache": self.target.cache_bytes(batch, slots),
    }
    if self._separate:
      parts["draft weights"] = self.draft.weight_bytes
      parts["draft cache"] = self.draft.cache_bytes(batch, slots)
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
