"""Prices rounds of speculative decoding: the one place that does.

  round = draft steps + update + verification of all nodes + commit + overhead

Draft steps that are passes of a decoder, or of the target's layers, are priced
by the same pass model as the target; other steps by the bytes and FLOPs that
the drafter's DrafterCost (specdec.types) states.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.roofline import theory
from specdec.roofline.cost import DRAW, Cost, Deployment, Term
from specdec.types import NO_COST, DrafterCost, StepCost


@dataclasses.dataclass(frozen=True)
class Overhead:
  """Seconds of a round beyond the sum of its passes.

  Covers sampling, acceptance and commit, and the difference (of either sign)
  between a pass inside the loop and the same pass timed in isolation.
  """

  # (batch, seconds per round, seconds per draft pass), ascending in batch;
  # interpolated linearly in log batch, constant outside.
  rows: tuple[tuple[float, float, float], ...] = ()

  def seconds(self, batch: float, levels: int) -> float:
    """Returns the overhead of a round with so many draft passes."""
    if not self.rows:
      return 0.0
    batches, fixed, per_level = zip(*self.rows)
    totals = [f + x * levels for f, x in zip(fixed, per_level)]
    return float(np.interp(math.log(batch), np.log(batches), totals))


NOTHING = Overhead()
PIECE = 8  # tokens of a pass in which a draft model catches up


class Round(NamedTuple):
  """The cost of one round.

  Names of parts begin with draft, first layers, update, target or commit.
  """

  parts: tuple[tuple[str, int, Cost], ...]  # (name, repetitions, cost of one)
  overhead: float  # seconds

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
    parts = [("target, 1 token", 1, target.cost(batch, 1, context))]
    return _round(parts, overhead.seconds(batch, 0))
  if drafter.step is None:
    raise ValueError("what a step of this drafter reads is unknown")
  decoder = draft_deployment or deployment_of(target, drafter)
  # The root and every level but the last are run by a draft step.
  frontiers, nodes = (1, *levels[:-1]), 1 + sum(levels)
  steps = [(n, n) for n in frontiers]  # tokens of each, and those projected
  if drafter.steps is not None:
    projected = len(levels) / max(1, drafter.steps)
    steps = [(drafter.tokens or projected, projected)] * drafter.steps
  if steps:
    more = drafter.catch_up + drafter.level_catch_up * len(levels)
    tokens, projected = steps[0]
    steps[0] = tokens + more, projected + (0 if drafter.steps else more)
  draws = len(levels) / drafter.steps if drafter.steps else 1  # after a step
  if drafter.level is not None:
    draws = 0
  parts = []
  for step, times in sorted(collections.Counter(steps).items()):
    tokens, projected = step
    name = f"draft, {_tokens(tokens)}"
    if decoder is not None:
      parts.append((name, times, decoder.cost(batch, tokens, context)))
    if drafter.step.layers:
      where = batch, tokens, context
      cost = step_cost(target, drafter.step, *where, projected, draws)
      name = f"draft head, {_tokens(tokens)}" if decoder else name
      parts.append((name, times, cost))
  if drafter.level is not None:
    for tokens, times in sorted(collections.Counter(frontiers).items()):
      cost = step_cost(target, drafter.level, batch, tokens, context)
      parts.append((f"draft successor, {_tokens(tokens)}", times, cost))
  if drafter.exit_layer:
    # The leaves have no KV in the first layers yet.
    first_layers = dataclasses.replace(decoder, head=False)
    leaves = nodes - sum(frontiers)
    cost = first_layers.cost(batch, leaves, context)
    parts.append((f"first layers, {_tokens(leaves)}", 1, cost))
  if drafter.update is not None:
    tokens = len(levels) + drafter.update_catch_up
    cost = step_cost(target, drafter.update, batch, tokens, context)
    parts.append((f"update, {_tokens(tokens)}", 1, cost))
  verifier = dataclasses.replace(target, start=drafter.exit_layer)
  committed = most_committed(drafter, len(levels))
  cost = verifier.cost(batch, nodes, context, committed)
  parts.append((f"target, {_tokens(nodes)}", 1, cost))
  result = _round(parts, overhead.seconds(batch, len(levels)))
  if chain:
    return result
  # The accepted path's KV is compacted.
  path = 1 + len(levels)
  moved = 2 * target.moved_bytes(batch, path)
  if drafter.shape is not None and not drafter.shares_target:
    moved += 2 * decoder.moved_bytes(batch, path)
  seconds = moved / (target.efficiency.kv * target.chip.bandwidth)
  commit = Cost((Term("KV moved", moved, seconds=seconds),), seconds)
  return result._replace(parts=(*result.parts, ("commit", 1, commit)))


def most_committed(drafter: DrafterCost, depth: int) -> int:
  """Returns for how many committed tokens a verification is charged: of drafts
  in the target's own layers, which commit as well, one."""
  return 1 if drafter.shares_target else 1 + depth


def _round(parts: list, overhead: float) -> Round:
  """Returns a round that takes no less time than moving its bytes.

  A fitted overhead may be negative; extrapolated, it could exceed the time of
  the passes themselves, so it is clipped.
  """
  slack = sum(n * (cost.seconds - cost.least) for _, n, cost in parts)
  return Round(tuple(parts), max(overhead, -slack))


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
  projected: float | None = None,
  draws: float = 1,
) -> Cost:
  """Prices a pass by its stated bytes and FLOPs, on the target's chips.

  Args:
    tokens: per row.
    context: cached positions per row.
    projected: tokens per row whose logits are computed; None: all.
    draws: levels that are drawn from them, one after another.
  """
  rows = math.ceil(batch / target.replicas)
  m, n = rows * tokens, rows * (tokens if projected is None else projected)
  attention, read = 0.0, rows * step.row_bytes
  written = m * step.written_bytes
  everything = None, step.position_bytes, step.position_flops
  for window, size, flops in (everything, *step.windows):
    seen = window.cached(context) if window else context
    read += rows * seen * size
    written += m * size
    attention += m * (seen + tokens) * flops
  split = (step.split_bytes + step.target_bytes) / target.ways
  split_flops = (step.split_flops + step.target_flops) / target.ways
  gathered, in_parts = step.gathered_logits, step.split_logits
  if target.ways > 1:
    in_parts += gathered
  logits = step.logits + gathered + in_parts / target.ways
  exchanges = [(count, m * size) for count, size in step.all_reduces]
  if step.split_logits and draws:
    exchanges.append((DRAW * draws, 4 * n / draws))
  if gathered:
    exchanges.append((1, 4 * n * gathered))
  touched = computed = 0.0
  for size, flops, count, per_token in step.experts:
    touched += size * target.experts_touched(count, per_token, m)
    computed += m * per_token * flops
  terms = [
    Term("experts", touched, computed),
    Term("weights", step.bytes, m * step.flops),
    Term("projection", split, n * split_flops),
    Term("KV read", read, attention),
    Term("KV written", written),
    Term("logits", 2 * 4 * n * logits),
    target.all_reduces(*exchanges),
  ]
  return target.timed(m, terms, step.layers)


def _tokens(n: float) -> str:
  return "1 token" if n == 1 else f"{n:g} tokens"


USABLE = 0.9  # of a chip's memory; the rest is for programs and temporaries


@dataclasses.dataclass(frozen=True)
class TargetDraftPair:
  """A target and its drafter on chips."""

  target: Deployment
  drafter: DrafterCost = NO_COST
  draft: Deployment | None = None  # of a draft model; None: as deployment_of
  overhead: Overhead = NOTHING  # of a speculative round
  baseline_overhead: Overhead = NOTHING

  def round(
    self, batch: float, draft: int | Sequence[int], context: float
  ) -> Round:
    """Prices a round; `draft` as of `round_cost`, 0 for the baseline."""
    return round_cost(
      self.target,
      self.drafter,
      draft,
      batch,
      context,
      draft_deployment=self.draft,
      overhead=self.overhead if draft else self.baseline_overhead,
    )

  def catch_up(self, batch: float, context: float) -> float:
    """Returns the seconds, a position, that a draft model takes to read what
    was written without it; 0 of drafters that keep up with every round."""
    if self.drafter.shape is None or self.drafter.shares_target:
      return 0.0
    decoder = self.draft or deployment_of(self.target, self.drafter)
    decoder = dataclasses.replace(decoder, head=False)
    return decoder.cost(batch, PIECE, context).seconds / PIECE

  def speedup(
    self, batch: float, context: float, prefix_acceptance: Sequence[float]
  ) -> float:
    """Returns the speedup over autoregressive decoding, k = len(curve)."""
    baseline = self.round(batch, 0, context).seconds
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
    cost = self.drafter
    if not cost.is_complete:
      raise ValueError("what this drafter holds in memory is unknown")
    if cost.shape is not None and not cost.shares_target:
      decoder = self.draft or deployment_of(self.target, cost)
      parts["draft weights"] = decoder.weight_bytes
      parts["draft cache"] = decoder.cache_bytes(batch, slots)
    elif cost.weight_bytes or cost.row_bytes or cost.position_bytes:
      rows = math.ceil(batch / self.target.replicas)
      state = cost.row_bytes + slots * cost.position_bytes
      parts["draft weights"] = cost.weight_bytes
      parts["draft cache"] = rows * state
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
