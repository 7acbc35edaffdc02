"""Plans from costs: the k that pays, the batch that fits, schedules."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specdec.roofline import theory, trees
from specdec.roofline.cost import Deployment
from specdec.roofline.pairs import USABLE, TargetDraftPair
from specdec.roofline.shapes import Shape


class Best(NamedTuple):
  """The k that pays most."""

  k: int  # 0: autoregressive decoding
  speedup: float
  tokens: float  # of a round


def curve(alpha_or_prefix_acceptance, most: int) -> np.ndarray:
  """[most] prefix_acceptance: of a rate, or a curve's first values."""
  if np.ndim(alpha_or_prefix_acceptance) == 0:
    return theory.iid_prefix_acceptance(float(alpha_or_prefix_acceptance), most)
  return theory.check_prefix_acceptance(alpha_or_prefix_acceptance)[:most]


def best_k(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  prefix_acceptance,
  most: int = 16,
) -> Best:
  """The k <= most that decodes fastest.

  Args:
    prefix_acceptance: one rate for all positions, or a curve, which also bounds
      k.
  """
  known = curve(prefix_acceptance, most)
  found = Best(0, 1.0, 1.0)
  for k in range(1, len(known) + 1):
    gain = pair.speedup(batch, context, known[:k])
    if gain > found.speedup:
      found = Best(k, gain, theory.expected_tokens(known[:k]))
  return found


class Sized(NamedTuple):
  """A draft of some size, and what it gains."""

  shape: Shape
  alpha: float
  best: Best


def best_draft(
  target: Deployment,
  drafts: Sequence[Shape],
  distribution: theory.PowerLaw,
  batch: float,
  context: float,
  most: int = 16,
) -> list[Sized]:
  """What every size gains with its own best k, by a distribution of acceptance.

  Raises:
    ValueError: the vocabularies differ.
  """
  found = []
  for shape in drafts:
    draft = dataclasses.replace(target, shape=shape)
    alpha = distribution.alpha(shape.num_parameters)
    best = best_k(TargetDraftPair(target, draft), batch, context, alpha, most)
    found.append(Sized(shape, alpha, best))
  return found


def best_tree(
  pair: TargetDraftPair,
  batch: float,
  context: float,
  acceptance: Sequence[float],
  most: int = 64,
) -> trees.Choice:
  """The static tree with the most tokens a second, priced as a whole round.

  It is looked for with levels that cost alike (trees.best).

  Args:
    acceptance: how often a node's r-th child is the one that is kept.
    most: nodes, the root included.
  """
  sizes = sorted({*range(1, min(16, most) + 1), *range(16, most + 1, 8)})
  chain = pair.round(batch, 1, context)
  level = chain.parts[:-1]
  level_seconds = sum(times * cost.seconds for _, times, cost in level)
  target = pair.target
  if pair.exit_layer is not None:
    target = dataclasses.replace(target, start=pair.exit_layer)
  fixed = chain.overhead
  costs = {n: target.cost(batch, n, context) for n in sizes}
  seconds = {n: max(c.seconds + fixed, c.least) for n, c in costs.items()}
  baseline = seconds[1] = pair.baseline(batch, context).seconds
  found = trees.best(acceptance, seconds, level_seconds)
  if not found.paths:
    return found
  depths = [len(path) for path in found.paths]
  levels = [depths.count(depth) for depth in range(1, max(depths) + 1)]
  whole = pair.tree_round(batch, levels, context).seconds
  if found.tokens / whole <= 1 / baseline:
    return trees.Choice([], 1.0, baseline)
  return found._replace(seconds=whole)


def break_even_batch(
  pair: TargetDraftPair,
  context: float,
  prefix_acceptance,
  most: int = 16,
  largest: int = 4096,
) -> int | None:
  """The smallest batch from which on no k pays; None where one still does at
  `largest`. Below it, of a mixture of experts, may lie batches that do not pay
  either: `schedule` tells."""
  last = schedule(pair, context, prefix_acceptance, most, largest)[-1]
  if last.k:
    return None
  batch = last.first  # a stretch is evaluated by its last batch
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
  """The shortest context from which on some k pays again at this batch, as
  KV to read makes memory the limit; None where none up to `largest` does."""

  def pays(context: int) -> bool:
    return best_k(pair, batch, context, prefix_acceptance, most).k > 0

  high = 1
  while not pays(high):
    if high >= largest:
      return None
    high *= 2
  low = high // 2
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (low, middle) if pays(middle) else (middle, high)
  return 0 if pays(0) else high


def largest_batch(pair: TargetDraftPair, slots: float) -> int:
  """Rows that fit with so many cached positions each; 0 where none does.

  The draft's weights and cache count: at equal memory speculation decodes fewer
  rows than autoregressive decoding.
  """
  replicas = pair.target.replicas
  empty, full = (sum(pair.memory(b, slots).values()) for b in (0, replicas))
  room = USABLE * pair.target.chip.memory - empty
  return max(0, math.floor(room / (full - empty))) * replicas


class Throughput(NamedTuple):
  """Decoding with as many rows as fit."""

  batch: int
  k: int
  tokens_per_second: float
  seconds_per_token: float  # of a row


def at_equal_memory(
  pair: TargetDraftPair, slots: float, prefix_acceptance, most: int = 16
) -> tuple[Throughput, Throughput]:
  """(with the drafter in memory, without), each with its own largest batch and
  the k that decodes fastest there.

  Raises:
    ValueError: not even one row fits.
  """
  alone = dataclasses.replace(pair, draft=None, exit_layer=None, skips=False)
  found = []
  for who in (pair, alone):
    batch = largest_batch(who, slots)
    if not batch:
      who.check_memory(1, slots)
    best = Best(0, 1.0, 1.0)
    if who is pair:
      best = best_k(pair, batch, slots, prefix_acceptance, most)
    seconds = who.round(batch, best.k, slots).seconds
    rate = batch * best.tokens / seconds
    found.append(Throughput(batch, best.k, rate, seconds / best.tokens))
  return found[0], found[1]


class BatchRange(NamedTuple):
  """Batches first .. last decode fastest with k draft tokens."""

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
  """The best k for every batch up to `largest`, equal ones together."""
  found: list[BatchRange] = []
  for batch in _steps(largest):
    k = best_k(pair, batch.stop - 1, context, prefix_acceptance, most).k
    first, last = batch.start, batch.stop - 1
    if found and found[-1].k == k:
      first = found.pop().first
    found.append(BatchRange(first, last, k))
  return found


def _steps(largest: int) -> Iterator[range]:
  """Batches one by one to 16, then in stretches a sixteenth of their size."""
  first = 1
  while first <= largest:
    last = min(largest, first + max(1, first // 16) - 1)
    yield range(first, last + 1)
    first = last + 1


def as_vllm(batch_ranges: Sequence[BatchRange]) -> dict:
  """Of vLLM's `speculative_config` (pull request 32374): [first, last, k]."""
  return {
    "num_speculative_tokens": max(
      batch_range.k for batch_range in batch_ranges
    ),
    "num_speculative_tokens_per_batch_size": [list(s) for s in batch_ranges],
  }


def as_tensorrt_llm(batch_ranges: Sequence[BatchRange]) -> dict:
  """Of TensorRT-LLM's speculative config (pull request 10860): last batch -> k.

  Beyond the last entry it does not speculate.

  Raises:
    ValueError: it cannot be said so: no batch pays, or the smallest ones do not
      want the longest drafts.
  """
  known = {batch_range.last: batch_range.k for batch_range in batch_ranges}
  if batch_ranges[-1].k == 0:
    del known[batch_ranges[-1].last]
  most = max(batch_range.k for batch_range in batch_ranges)
  if not most:
    raise ValueError("no batch pays: leave speculation out")
  if batch_ranges[0].k != most:
    raise ValueError(
      "its longest draft belongs to the smallest batch, and here batch 1 wants "
      f"k = {batch_ranges[0].k} and others up to {most}"
    )
  return {"max_draft_len": most, "draft_len_schedule": known}
