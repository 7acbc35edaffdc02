"""Prices a round of speculative decoding: the one place that does.

  round = draft steps + update + verification of all nodes + commit + overhead

A drafter brings a DrafterCost (specdec.types), the target a Deployment on
chips. Draft steps that are passes of a decoder, or of the target's layers, are
priced by the same pass model as the target; other steps by the bytes and FLOPs
that the drafter states.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.roofline.cost import Cost, Deployment, Term
from specdec.types import DrafterCost, StepCost


@dataclasses.dataclass(frozen=True)
class Overhead:
  """Seconds of a round beyond the sum of its passes.

  Covers sampling, acceptance and commit, and the difference (of either sign)
  between a pass inside the loop and the same pass timed in isolation.

  Attributes:
    rows: (batch, seconds per round, seconds per draft pass), ascending in
      batch; interpolated linearly in log batch, constant outside.
  """

  rows: tuple[tuple[float, float, float], ...] = ()

  def seconds(self, batch: float, levels: int) -> float:
    """Returns the overhead of a round with so many draft passes."""
    if not self.rows:
      return 0.0
    batches, fixed, per_level = zip(*self.rows)
    totals = [f + x * levels for f, x in zip(fixed, per_level)]
    return float(np.interp(math.log(batch), np.log(batches), totals))


NOTHING = Overhead()


class Round(NamedTuple):
  """The cost of one round.

  Names of parts begin with draft, first layers, update, target or commit.
  """

  parts: tuple[tuple[str, int, Cost], ...]  # (name, repetitions, cost of one)
  overhead: float  # seconds

  @classmethod
  def make(cls, parts, overhead: float) -> "Round":
    """Returns a round that takes no less time than moving its bytes.

    A fitted overhead may be negative; extrapolated, it could exceed the time of
    the passes themselves, so it is clipped.
    """
    slack = sum(n * (cost.seconds - cost.least) for _, n, cost in parts)
    return cls(parts, max(overhead, -slack))

  @property
  def seconds(self) -> float:
    return self.overhead + sum(n * cost.seconds for _, n, cost in self.parts)

  @property
  def bytes(self) -> float:
    """Main-memory bytes per chip."""
    return sum(n * cost.bytes for _, n, cost in self.parts)

  @property
  def flops(self) -> float:
    return sum(n * cost.flops for _, n, cost in self.parts)

  @property
  def sent(self) -> float:
    """Bytes that a chip sends to others."""
    return sum(n * cost.sent for _, n, cost in self.parts)

  def only(self, *kinds: str) -> "Round":
    """Returns the parts whose names begin with one of `kinds`, no overhead."""
    return Round(tuple(p for p in self.parts if p[0].startswith(kinds)), 0.0)


def round_cost(
  target: Deployment,
  drafter: DrafterCost,
  draft: int | Sequence[int],
  batch: float,
  context: float,
  *,
  draft_deployment: Deployment | None = None,
  overhead: Overhead = NOTHING,
) -> Round:
  """Prices one round.

  Args:
    target: the model that verifies.
    drafter: what drafting reads.
    draft: k of a chain, or a tree's number of nodes at each depth from 1 on;
      0 or (): autoregressive decoding.
    batch: rows over all replicas.
    context: cached positions that attention reads per row.
    draft_deployment: where the drafter's decoder runs, if not on the target's
      chips as efficiently as the target; see `deployment_of`.
    overhead: seconds beyond the passes.

  Returns:
    Seconds, and the passes with their terms: bytes, FLOPs, collectives.

  Raises:
    ValueError: the drafter's cost is unknown, or its vocabulary differs.
  """
  chain = isinstance(draft, (int, np.integer))
  levels = (1,) * int(draft) if chain else tuple(draft)
  if not levels:
    cost = target.cost(batch, 1, context)
    seconds = overhead.seconds(batch, 0)
    return Round.make((("target, 1 token", 1, cost),), seconds)
  if drafter.step is None:
    raise ValueError("what a step of this drafter reads is unknown")
  decoder = draft_deployment or deployment_of(target, drafter)
  # The root and every level but the last are run by a draft step.
  frontiers, nodes = (1, *levels[:-1]), 1 + sum(levels)
  steps = _steps(drafter, frontiers)
  parts = []
  for tokens, times in sorted(collections.Counter(steps).items()):
    name = f"draft, {_tokens(tokens)}"
    if decoder is not None:
      parts.append((name, times, decoder.cost(batch, tokens, context)))
    if drafter.step.layers:
      cost = step_cost(target, drafter.step, batch, tokens, context)
      name = f"draft head, {_tokens(tokens)}" if decoder else name
      parts.append((name, times, cost))
  if drafter.exit_layer:
    # The leaves have no KV in the first layers yet.
    first_layers = dataclasses.replace(decoder, head=False)
    leaves = nodes - sum(frontiers)
    cost = first_layers.cost(batch, leaves, context)
    parts.append((f"first layers, {_tokens(leaves)}", 1, cost))
  if drafter.update is not None:
    tokens = len(levels)
    cost = step_cost(target, drafter.update, batch, tokens, context)
    parts.append((f"update, {_tokens(tokens)}", 1, cost))
  verifier = dataclasses.replace(target, start=drafter.exit_layer)
  cost = verifier.cost(batch, nodes, context)
  parts.append((f"target, {_tokens(nodes)}", 1, cost))
  result = Round.make(tuple(parts), overhead.seconds(batch, len(levels)))
  if chain:
    return result
  # The accepted path's KV is compacted.
  path = 1 + len(levels)
  moved = 2 * target.cache_bytes(batch, path)
  if drafter.shape is not None and not drafter.shares_target:
    moved += 2 * decoder.cache_bytes(batch, path)
  seconds = moved / (target.efficiency.kv * target.chip.bandwidth)
  commit = Cost((Term("KV moved", moved, seconds=seconds),), seconds)
  return result._replace(parts=(*result.parts, ("commit", 1, commit)))


def deployment_of(
  target: Deployment, drafter: DrafterCost
) -> Deployment | None:
  """Returns the decoder that drafts, deployed like the target; None: none.

  Raises:
    ValueError: its vocabulary differs from the target's.
  """
  if drafter.exit_layer:
    return dataclasses.replace(
      target, stop=drafter.exit_layer, head=drafter.exit_head
    )
  if drafter.shape is None:
    return None
  ours, theirs = drafter.shape.vocab_size, target.shape.vocab_size
  if ours != theirs:
    raise ValueError(
      f"draft and target have vocabularies of {ours} and {theirs}; they must "
      "share one"
    )
  return dataclasses.replace(target, shape=drafter.shape)


def step_cost(
  target: Deployment,
  step: StepCost,
  batch: float,
  tokens: float,
  context: float,
) -> Cost:
  """Prices a pass by its stated bytes and FLOPs, on the target's chips.

  Args:
    tokens: per row.
    context: cached positions per row.
  """
  rows = math.ceil(batch / target.replicas)
  m = rows * tokens
  efficiency = target.efficiency
  seconds = efficiency.overhead + step.layers * efficiency.layer_overhead
  attention = m * (context + tokens) * step.position_flops
  return target.timed(
    m,
    [
      Term("weights", step.bytes, m * step.flops),
      Term(
        "projection",
        step.target_bytes / target.ways,
        m * step.target_flops / target.ways,
      ),
      Term("KV read", rows * context * step.position_bytes, attention),
      Term("KV written", m * step.position_bytes),
      Term("logits", 2 * 4 * m * step.logits),
      Term("overhead", seconds=seconds),
    ],
  )


def _steps(drafter: DrafterCost, frontiers: Sequence[int]) -> list[float]:
  """Returns the tokens per row of every draft step."""
  if drafter.steps == 0:
    return []
  steps = list(frontiers)
  if drafter.steps is not None:
    steps = [sum(frontiers) / drafter.steps] * drafter.steps
  return [steps[0] + drafter.catch_up, *steps[1:]]


def _tokens(n: float) -> str:
  return "1 token" if n == 1 else f"{n:g} tokens"
