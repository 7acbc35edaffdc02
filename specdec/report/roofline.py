"""Formats predictions for a terminal: rounds, plans, drafts and trees."""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from specdec.benchmark.scenario import Scenario
from specdec.roofline import planning, theory
from specdec.roofline.chips import Chip
from specdec.roofline.round_cost import Round, TargetDraftPair
from specdec.utils.terminal import columns

_LARGEST = 256  # batch of a schedule


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is decoded."""

  acceptance: float | Sequence[float]  # of all positions, or by prefix
  batches: Sequence[int]  # of tables and pictures
  contexts: Sequence[int]
  context: int  # where there is one only
  most: int  # largest k

  @property
  def curve(self) -> np.ndarray:
    """Prefix acceptance, [most] or shorter."""
    return planning.curve(self.acceptance, self.most)

  def best(
    self, pair: TargetDraftPair, batch: int, context: int | None = None
  ) -> planning.Point:
    """Returns the best k of a batch."""
    context = self.context if context is None else context
    return planning.best_k(pair, batch, context, self.acceptance, self.most)


def fits(pair: TargetDraftPair, batch: int, context: int) -> bool:
  """Whether weights and caches fit into a chip."""
  try:
    pair.check_memory(batch, context)
  except ValueError:
    return False
  return True


def gain(pair: TargetDraftPair, batch: int, context: int, curve) -> float:
  """Returns the speedup; nan where memory does not suffice."""
  if not fits(pair, batch, context):
    return math.nan
  return pair.speedup(batch, context, curve)


def memory(scenario: Scenario, context: int) -> str:
  """Names the chips and what each holds of one row."""
  gib = 2**30
  chip = scenario.deployment.chip
  parts = scenario.pair.memory(1, context).items()
  sizes = ", ".join(f"{name} {size / gib:.2f}" for name, size in parts)
  return (
    f"{scenario.num_chips} x {chip.name} ({chip.source}); of each chip's "
    f"{chip.memory / gib:.1f} GiB: {sizes}"
  )


def explain(cost: Round) -> str:
  """Lists what the parts of a round move and compute, term by term."""

  def line(part, times, term, size, flops, sent, seconds):
    amounts = ((size, 1e6), (flops, 1e9), (sent, 1e6))
    numbers = [f"{x / unit:.3g}" if x else "" for x, unit in amounts]
    # Rounding noise of a fit prints as 0.
    return [part, times, term, *numbers, f"{round(1e3 * seconds, 6):z.4g}"]

  lines = []
  for name, times, one in cost.parts:
    sums = one.bytes, one.flops, one.sent, one.seconds
    lines.append(line(name, str(times), "", *sums))
    lines += [line("", "", *x) for x in one.terms if x.seconds or x.bytes]
  lines.append(line("round overhead", "1", "", 0, 0, 0, cost.overhead))
  header = ["part", "times", "term", "MB", "GFLOP", "MB sent", "ms"]
  return columns(header, lines)


def rounds(pair: TargetDraftPair, workload: Workload) -> str:
  """Lists where a baseline round and the best round spend their time."""
  curve, context = workload.curve, workload.context
  best = workload.best(pair, 1).k
  texts = []
  for k in sorted({0, best or len(curve)}):
    cost = pair.round(1, k, context)
    one = theory.latency(curve[:k], cost.seconds)
    texts += [
      f"\na round of k = {k}, batch 1, context {context}",
      explain(cost),
      f"  {theory.expected_tokens(curve[:k]):.2f} tokens in "
      f"{1e3 * cost.seconds:.3f} ms; a token of a text of 128 takes "
      f"{1e3 * one.mean:.3f} ms in the mean, {1e3 * one.p99:.3f} ms in one "
      "text of a hundred",
    ]
  return "\n".join(texts)


def plans(pair: TargetDraftPair, workload: Workload) -> str:
  """Lists best k, break-even, equal memory and schedules for engines."""
  acceptance, context = workload.acceptance, workload.context
  most = workload.most

  def entry(batch: int, size: int) -> str:
    if not fits(pair, batch, size):
      return "-"
    best = workload.best(pair, batch, size)
    return f"{best.k}: {best.speedup:.2f}"

  header = ["batch \\ context", *map(str, workload.contexts)]
  table = [
    [str(batch), *(entry(batch, size) for size in workload.contexts)]
    for batch in workload.batches
  ]
  lines = ["\nbest k and its speedup; -: does not fit", columns(header, table)]
  where = f"\nat context {context}"
  batch = planning.break_even_batch(pair, context, acceptance, most)
  if batch is None:
    lines.append(f"{where} some k pays at batch 4096 still")
  else:
    lines.append(f"{where} no k pays from batch {batch} on")
    length = planning.break_even_context(pair, batch, acceptance, most)
    if length:
      lines.append(f"at batch {batch} it pays from context {length} on")
  largest = _LARGEST
  if np.isfinite(pair.target.chip.memory):  # some machines do not report it
    largest = min(largest, planning.largest_batch(pair, context))
    equal = planning.at_equal_memory(pair, context, acceptance, most)
    lines += [
      f"as many rows as fit {name}: {one.batch}, with k = {one.k} "
      f"{one.tokens_per_second:,.0f} tokens/s, "
      f"{1e3 * one.seconds_per_token:.1f} ms a token"
      for name, one in zip(("with the drafter", "without it"), equal)
    ]
  ranges = planning.schedule(pair, context, acceptance, most, largest)
  try:
    tensorrt = json.dumps(planning.as_tensorrt_llm(ranges))
  except ValueError as error:
    tensorrt = str(error)
  vllm = json.dumps(planning.as_vllm(ranges))
  return "\n".join([*lines, f"vLLM: {vllm}", f"TensorRT-LLM: {tensorrt}"])


def pairs_of(
  scenario: Scenario, others: Sequence[Chip]
) -> dict[str, TargetDraftPair]:
  """Returns the pair on the scenario's chip and on others, by their names."""
  pairs = {scenario.deployment.chip.name: scenario.pair}
  for chip in others:
    pairs.setdefault(chip.name, scenario.on(chip).pair)
  return pairs


def by_chip(
  scenario: Scenario, workload: Workload, others: Sequence[Chip]
) -> str:
  """Lists the chip and as many of others side by side: one row, then the
  largest batch that pays."""
  context, lines = workload.context, []
  for name, pair in pairs_of(scenario, others).items():
    chip = pair.target.chip
    ridge = chip.rate(pair.target.dtype) / chip.bandwidth
    mark = "~" if pair.target.dtype in chip.inferred else ""
    line = [name, f"{chip.bandwidth / 1e12:.3g}", f"{mark}{ridge:.0f}"]
    if fits(pair, 1, context):
      best, baseline = workload.best(pair, 1), pair.round(1, 0, context)
      tokens = 1 / baseline.seconds
      batch = planning.break_even_batch(
        pair, context, workload.acceptance, workload.most
      )
      line += [
        f"{tokens:,.0f}",
        f"{tokens * best.speedup:,.0f}",
        str(best.k),
        f"{best.speedup:.2f}",
        "4096 still" if batch is None else str(batch - 1),
        str(planning.largest_batch(pair, context)),
      ]
    else:
      line += ["does not fit", *[""] * 5]
    lines.append(line)
  header = ["chip", "TB/s", "FLOP/byte", "baseline tok/s", "tok/s", "k"]
  header += ["speedup", "pays up to batch", "rows that fit"]
  return (
    f"\n{scenario.num_chips} of each chip, batch 1, context {context}; ~: a "
    "FLOP/s that is inferred, not published\n" + columns(header, lines)
  )


def best_draft(
  scenario: Scenario,
  workload: Workload,
  names: Sequence[str],
  acceptance: theory.PowerLaw,
) -> str:
  """Names the draft size that gains most, by acceptance as a power law."""
  sizes = planning.best_draft(
    scenario.pair.target,
    [scenario.shape_of(name) for name in names],
    acceptance,
    1,
    workload.context,
    workload.most,
  )
  best = max(sizes, key=lambda sized: sized.best.speedup)
  return (
    "best draft size by --draft_acceptance, batch 1: "
    f"{best.shape.num_parameters / 1e9:.3g} B parameters, {best.alpha:.2f} of "
    f"its draft tokens accepted, k = {best.best.k}, {best.best.speedup:.2f} "
    "times autoregressive decoding"
  )


def best_tree(
  pair: TargetDraftPair, workload: Workload, rates: Sequence[float]
) -> str:
  """Names the tree that gains most where children are accepted at `rates`."""
  tree = planning.best_tree(pair, 1, workload.context, rates)
  baseline = pair.round(1, 0, workload.context).seconds
  levels = len(tree.paths[-1]) if tree.paths else 0
  return (
    f"best tree at batch 1: {len(tree.paths)} draft tokens in {levels} "
    f"levels, {tree.tokens:.2f} tokens in {1e3 * tree.seconds:.2f} ms, "
    f"{tree.tokens * baseline / tree.seconds:.2f} times autoregressive decoding"
  )
