"""Plans from costs: best k, best draft size, largest batch, schedules."""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.roofline import drafter_cost, theory, trees
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import USABLE, TargetDraftPair
from specdec.roofline.shapes import Shape
from specdec.types import NO_COST


class Point(NamedTuple):
  """What k draft tokens a round are predicted to give."""

  k: int  # 0: autoregressive decoding
  tokens: float  # expected per round and row
  seconds: float  # per round
  speedup: float  # over autoregressive decoding


def curve(alpha_or_prefix_acceptance, most: int) -> np.ndarray:
  """Returns prefix acceptance [most] of a rate, or a curve's first values."""
  if np.ndim(alpha_or_prefix_acceptance) == 0:
    return theory.iid_prefix_acceptance(float(alpha_or_prefix_acceptance), most)
  return theory.check_prefix_acceptance(alpha_or_prefix_acceptance)[:most]


def sweep_k(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  prefix_acceptance,
  most: int = 16,
  wide: float = 1.0,
  scale: Sequence[float] | None = None,
) -> list[Point]:
  """Predicts rounds of k = 0, 1, ..., most.

  Args:
    prefix_acceptance: one rate for all positions, or a curve, whose length also
      bounds k.
    wide: share of the batch's rounds that have draft tokens at all; the others
      run one token a row, as the baseline does.
    scale: [most + 1] factors of rounds' seconds (RoundFit.scale); default 1.
  """
  rates = curve(prefix_acceptance, most)
  scale = np.ones(most + 1) if scale is None else scale
  baseline = scale[0] * pair.round(batch, 0, context).seconds
  points = [Point(0, 1.0, baseline, 1.0)]
  for k in range(1, len(rates) + 1):
    tokens = theory.expected_tokens(rates[:k])
    full = scale[k] * pair.round(batch, k, context).seconds
    seconds = wide * full + (1 - wide) * baseline
    points.append(Point(k, tokens, seconds, tokens * baseline / seconds))
  return points


def chain_seconds(
  pair: TargetDraftPair, batch: float, context: float, steps: int, nodes: int
) -> float:
  """Returns the seconds of a round of so many draft steps, one token each, that
  verifies `nodes` nodes, however many of these were drafted."""
  drafted, verified = (
    pair.round(batch, draft, context) for draft in (steps, nodes - 1)
  )
  drafting = drafted.seconds - drafted.only("target").seconds
  return drafting + verified.only("target").seconds


def step_costs(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  widths: Sequence[int],
  scale: Sequence[float] | None = None,
) -> tuple[float, ...]:
  """Returns the seconds of rounds that draft 0, 1, ... levels of a chain.

  Args:
    widths: ascending node counts; a round is verified at the smallest that
      holds its draft and the pending token.
    scale: factors of the seconds of rounds that fill their width, as of
      `sweep_k`.

  Returns:
    As many as the last width: a table for `draft_length.adaptive`. It ascends.
  """
  seconds, most = [], widths[-1] - 1
  for levels in range(most + 1):
    nodes = min(width for width in widths if width > levels)
    drafting = levels or pair.drafter.exit_layer
    steps = most if pair.drafter.drafts_all and drafting else levels
    whole = chain_seconds(pair, batch, context, steps, nodes)
    seconds.append(whole * (1.0 if scale is None else scale[nodes - 1]))
  return tuple(np.maximum.accumulate(seconds).tolist())


def best_k(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  prefix_acceptance,
  most: int = 16,
) -> Point:
  """Returns the fastest point of `sweep_k`."""
  points = sweep_k(pair, batch, context, prefix_acceptance, most)
  return max(points, key=lambda point: point.speedup)


class Sized(NamedTuple):
  """A draft model of some size at its best k."""

  shape: Shape
  alpha: float
  best: Point


def best_draft(
  target: Deployment,
  drafts: Sequence[Shape],
  distribution: theory.PowerLaw,
  batch: float,
  context: float,
  most: int = 16,
) -> list[Sized]:
  """Returns each draft size with its best k, by a power law of acceptance.

  Raises:
    ValueError: the vocabularies differ.
  """
  sizes = []
  for shape in drafts:
    pair = TargetDraftPair(target, drafter_cost.model(shape, target.weights))
    alpha = distribution.alpha(shape.num_parameters)
    sizes.append(Sized(shape, alpha, best_k(pair, batch, context, alpha, most)))
  return sizes


def best_tree(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  acceptance: Sequence[float],
  most: int = 64,
) -> trees.Choice:
  """Returns the static tree with the most tokens per second.

  Searches with a constant cost per level (trees.best), then prices the winner
  as a whole round.

  Args:
    acceptance: probability that a node's r-th child is the accepted one.
    most: largest number of nodes, the root included.
  """
  sizes = sorted({*range(1, min(16, most) + 1), *range(16, most + 1, 8)})
  chain = pair.round(batch, 1, context)
  level_seconds = chain.only("draft", "first layers").seconds
  target = dataclasses.replace(pair.target, start=pair.drafter.exit_layer)
  fixed = chain.overhead + chain.only("update").seconds
  costs = {n: target.cost(batch, n, context) for n in sizes}
  seconds = {n: max(c.seconds + fixed, c.least) for n, c in costs.items()}
  baseline = seconds[1] = pair.round(batch, 0, context).seconds
  choice = trees.best(acceptance, seconds, level_seconds)
  if not choice.paths:
    return choice
  depths = [len(path) for path in choice.paths]
  levels = [depths.count(depth) for depth in range(1, max(depths) + 1)]
  whole = pair.round(batch, levels, context).seconds
  if choice.tokens / whole <= 1 / baseline:
    return trees.Choice([], 1.0, baseline)
  return choice._replace(seconds=whole)


def break_even_batch(
  pair: TargetDraftPair,
  context: float,
  prefix_acceptance,
  most: int = 16,
  largest: int = 4096,
) -> int | None:
  """Returns the smallest batch from which on no k pays; None: above `largest`.

  For a mixture of experts some smaller batches may not pay either; `schedule`
  lists them.
  """
  last = schedule(pair, context, prefix_acceptance, most, largest)[-1]
  if last.k:
    return None
  batch = last.first  # `schedule` evaluates a range at its last batch
  while best_k(pair, batch, context, prefix_acceptance, most).k:
    batch += 1
  return batch


def break_even_context(
  pair: TargetDraftPair,
  batch: int,
  prefix_acceptance,
  most: int = 16,
  largest: int = 2**24,
) -> int | None:
  """Returns the shortest context at which some k pays; None: above `largest`.

  At a large batch long contexts make decoding memory-bound again, as the KV
  read grows.
  """

  def pays(context: int) -> bool:
    return best_k(pair, batch, context, prefix_acceptance, most).k > 0

  high = 1
  while not pays(high):
    if high >= largest:
      return None
    high *= 2
  if pays(0):
    return 0
  lengths = range(high // 2 + 1, high + 1)
  return lengths[bisect.bisect_left(lengths, True, key=pays)]


def largest_batch(pair: TargetDraftPair, slots: float) -> int:
  """Returns the number of rows of `slots` positions that fit; 0: none.

  Includes the draft's weights and cache, so that at equal memory speculative
  decoding has fewer rows than the baseline.
  """
  replicas = pair.target.replicas
  empty, full = (sum(pair.memory(b, slots).values()) for b in (0, replicas))
  room = USABLE * pair.target.chip.memory - empty
  return max(0, math.floor(room / (full - empty))) * replicas


class Throughput(NamedTuple):
  """Decoding at the largest batch that fits."""

  batch: int
  k: int
  tokens_per_second: float  # all rows
  seconds_per_token: float  # per row


def at_equal_memory(
  pair: TargetDraftPair, slots: float, prefix_acceptance, most: int = 16
) -> tuple[Throughput, Throughput]:
  """Compares speculative and baseline decoding, each at its largest batch.

  Returns:
    Throughput with the drafter at its best k, and without it.

  Raises:
    ValueError: not even one row fits.
  """
  alone = dataclasses.replace(pair, drafter=NO_COST, draft=None)
  throughputs = []
  for candidate, acceptance in ((pair, prefix_acceptance), (alone, ())):
    batch = largest_batch(candidate, slots)
    if not batch:
      candidate.check_memory(1, slots)
    best = best_k(candidate, batch, slots, acceptance, most)
    rate = batch * best.tokens / best.seconds
    per_row = best.seconds / best.tokens
    throughputs.append(Throughput(batch, best.k, rate, per_row))
  return throughputs[0], throughputs[1]


class BatchRange(NamedTuple):
  """Batches first..last decode fastest with k draft tokens."""

  first: int
  last: int
  k: int


def schedule(
  pair: TargetDraftPair,
  context: float,
  prefix_acceptance,
  most: int = 16,
  largest: int = 256,
) -> list[BatchRange]:
  """Returns the best k for every batch up to `largest`, as ranges."""
  ranges: list[BatchRange] = []
  last = 0
  while last < largest:  # every batch up to 16, then in steps of a sixteenth
    first = last + 1
    last = min(largest, last + max(1, first // 16))
    k = best_k(pair, last, context, prefix_acceptance, most).k
    if ranges and ranges[-1].k == k:
      first = ranges.pop().first
    ranges.append(BatchRange(first, last, k))
  return ranges


def as_vllm(batch_ranges: Sequence[BatchRange]) -> dict:
  """Formats a schedule for vLLM's `speculative_config` (vllm PR 32374)."""
  return {
    "num_speculative_tokens": max(one.k for one in batch_ranges),
    "num_speculative_tokens_per_batch_size": [list(s) for s in batch_ranges],
  }


def as_tensorrt_llm(batch_ranges: Sequence[BatchRange]) -> dict:
  """Formats a schedule for TensorRT-LLM (its PR 10860): {last batch: k}.

  Beyond the last entry TensorRT-LLM does not speculate.

  Raises:
    ValueError: the format cannot express the schedule: no batch pays, or the
      smallest batch does not have the largest k.
  """
  by_last = {one.last: one.k for one in batch_ranges}
  if batch_ranges[-1].k == 0:
    del by_last[batch_ranges[-1].last]
  most = max(one.k for one in batch_ranges)
  if not most:
    raise ValueError("no batch pays: decode autoregressively")
  if batch_ranges[0].k != most:
    raise ValueError(
      "TensorRT-LLM needs its largest k at the smallest batch; here batch 1 "
      f"wants k = {batch_ranges[0].k} and others up to {most}"
    )
  return {"max_draft_len": most, "draft_len_schedule": by_last}
