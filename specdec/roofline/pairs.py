"""A target and its drafter on chips: what a round takes, what it gains.

  round(k) = k draft passes + verification of k + 1 tokens + what is beside
  speedup  = E[tokens of a round] * plain round / round(k)

The first draft pass takes two tokens a row (rule 1: the drafter catches
up with its own last draft token), every other one.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.roofline import theory
from specdec.roofline.cost import Cost, Deployment, Term

USABLE = 0.9  # of a chip's memory; the rest is for programs and temporaries


@dataclasses.dataclass(frozen=True)
class Overhead:
  """Seconds of a round that its passes, timed alone, do not explain.

  Drawing, evaluating and committing; and what a pass takes more, or less, among
  the others of a round.

  Attributes:
    rows: (batch, seconds of every round, of each draft pass), ascending;
      between them it is interpolated over the logarithm of the batch, outside
      them the last one holds.
  """

  rows: tuple[tuple[float, float, float], ...] = ()

  def seconds(self, batch: float, levels: int) -> float:
    if not self.rows:
      return 0.0
    batches, fixed, of_level = zip(*self.rows)
    known = [f + x * levels for f, x in zip(fixed, of_level)]
    return float(np.interp(math.log(batch), np.log(batches), known))


NOTHING = Overhead()


def _tokens(n: int) -> str:
  return "1 token" if n == 1 else f"{n} tokens"


class Round(NamedTuple):
  """The parts of one round and what each of them takes."""

  parts: tuple[tuple[str, int, Cost], ...]  # (name, how often, cost)
  overhead: float

  @classmethod
  def make(cls, parts, overhead: float) -> "Round":
    """Returns a round that takes no less time than moving its bytes.

    A fitted overhead may be negative, and far from the rounds that it was
    fitted to exceed the passes' own time.
    """
    spare = sum(n * (cost.seconds - cost.least) for _, n, cost in parts)
    return cls(parts, max(overhead, -spare))

  @property
  def seconds(self) -> float:
    return self.overhead + sum(n * cost.seconds for _, n, cost in self.parts)


@dataclasses.dataclass(frozen=True)
class TargetDraftPair:
  """Who decodes.

  Attributes:
    target: verifies.
    draft: passes that draft token; None where draft tokens cost nothing (prompt
      lookup).
    exit_layer: the draft is the target's own first layers: it takes no memory,
      has no cache, and verification begins there.
    beside, plain_beside: of a speculative round and of a plain one.
    skips: the draft is the target less some sublayers: it takes no memory and
      has no cache either, and verification runs all there is.
  """

  target: Deployment
  draft: Deployment | None = None
  exit_layer: int | None = None
  overhead: Overhead = NOTHING
  baseline_overhead: Overhead = NOTHING
  skips: bool = False

  @property
  def _apart(self) -> bool:
    """The draft has weights and a cache of its own."""
    own = self.skips or self.exit_layer is not None
    return self.draft is not None and not own

  def __post_init__(self):
    if (
      self.draft and self.draft.shape.vocab_size != self.target.shape.vocab_size
    ):
      raise ValueError(
        f"draft and target have vocabularies of {self.draft.shape.vocab_size} "
        f"and {self.target.shape.vocab_size}; they must share one"
      )

  def baseline(self, batch: float, context: float) -> Round:
    """A round of autoregressive decoding."""
    cost = self.target.cost(batch, 1, context)
    overhead = self.baseline_overhead.seconds(batch, 0)
    return Round.make((("target, 1 token", 1, cost),), overhead)

  def round(self, batch: float, k: int, context: float) -> Round:
    """A round of a chain of k draft tokens; k = 0 is autoregressive."""
    if k == 0:
      return self.baseline(batch, context)
    return self._round(batch, (1,) * k, k + 1, context)

  def tree_round(
    self, batch: float, levels: Sequence[int], context: float
  ) -> Round:
    """A round whose draft is a tree with so many draft tokens on each level.

    What is beside the passes is that of a chain as deep.

    Every level but the last is a pass of the draft over it; the accepted path's
    KV is moved together.
    """
    if not levels:
      return self.baseline(batch, context)
    frontiers = (1, *levels[:-1])
    found = self._round(batch, frontiers, 1 + sum(levels), context)
    path = 1 + len(levels)
    moved = 2 * self.target.cache_bytes(batch, path)
    if self._apart:
      moved += 2 * self.draft.cache_bytes(batch, path)
    seconds = moved / (self.target.efficiency.kv * self.target.chip.bandwidth)
    commit = Cost((Term("KV moved", moved, seconds=seconds),), seconds)
    return found._replace(parts=(*found.parts, ("commit", 1, commit)))

  def _round(self, batch, frontiers, nodes, context) -> Round:
    """Draft passes over so many tokens each, then one over all nodes."""
    target, parts = self.target, []
    if self.draft is not None:
      # What drafts on the target's own KV has nothing to catch up with.
      late = int(self._apart)
      passes = [frontiers[0] + late, *frontiers[1:]]
      for tokens, times in sorted(collections.Counter(passes).items()):
        cost = self.draft.cost(batch, tokens, context)
        parts.append((f"draft, {_tokens(tokens)}", times, cost))
    if self.exit_layer is not None:
      # The last draft tokens have no KV in the first layers yet.
      last = dataclasses.replace(self.draft, head=False)
      left = nodes - sum(frontiers)
      cost = last.cost(batch, left, context)
      parts.append((f"first layers, {_tokens(left)}", 1, cost))
      target = dataclasses.replace(target, start=self.exit_layer)
    cost = target.cost(batch, nodes, context)
    parts.append((f"target, {_tokens(nodes)}", 1, cost))
    return Round.make(
      tuple(parts), self.overhead.seconds(batch, len(frontiers))
    )

  def speedup(
    self, batch: float, context: float, prefix_acceptance: Sequence[float]
  ) -> float:
    """Over autoregressive decoding; k is the length of the curve."""
    baseline = self.baseline(batch, context).seconds
    ours = self.round(batch, len(prefix_acceptance), context).seconds
    return theory.expected_tokens(prefix_acceptance) * baseline / ours

  def memory(self, batch: float, slots: float) -> dict[str, float]:
    """Bytes of one chip, by what they are for; logits for one token a row."""
    found = {
      "target weights": self.target.weight_bytes,
      "target cache": self.target.cache_bytes(batch, slots),
    }
    if self._apart:
      found["draft weights"] = self.draft.weight_bytes
      found["draft cache"] = self.draft.cache_bytes(batch, slots)
    return found

  def check_memory(self, batch: float, slots: float) -> None:
    """Refuses what the chip cannot hold.

    Raises:
      ValueError: by how much, and of what there is most.
    """
    found, chip = self.memory(batch, slots), self.target.chip
    total, room = sum(found.values()), USABLE * chip.memory
    if total > room:
      gib = 2**30
      parts = ", ".join(f"{name} {x / gib:.2f}" for name, x in found.items())
      worst = max(found, key=found.get)
      raise ValueError(
        f"batch {batch:g} at {slots:g} tokens needs {total / gib:.2f} GiB of "
        f"a {chip.name}, {(total - room) / gib:.2f} more than the "
        f"{room / gib:.2f} that can be used; {worst} take most ({parts})"
      )
