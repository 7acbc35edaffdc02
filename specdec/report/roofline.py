"""Formats predictions for a terminal: rounds, plans, drafts and trees."""

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from specdec.benchmark.scenario import Scenario
from specdec.roofline import planning, prediction, theory
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils.terminal import columns

_LARGEST = 256  # batch of a schedule


@dataclasses.dataclass(frozen=True)
class Workload:
  """What is decoded.

  Attributes:
    acceptance: one rate for all positions, or prefix acceptance.
    batches, contexts: of tables and pictures.
    context: where there is one only.
    most: largest k.
  """

  acceptance: float | Sequence[float]
  batches: Sequence[int]
  contexts: Sequence[int]
  context: int
  most: int

  @property
  def curve(self) -> np.ndarray:
    """Prefix acceptance, [most] or shorter."""
    return planning.curve(self.acceptance, self.most)

  def best(self, pair: TargetDraftPair, batch: int, context: int | None = None):
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
  chip = scenario.chip
  parts = scenario.pair.memory(1, context).items()
  sizes = ", ".join(f"{name} {size / gib:.2f}" for name, size in parts)
  return (
    f"{scenario.num_chips} x {chip.name} ({chip.source}); of each chip's "
    f"{chip.memory / gib:.1f} GiB: {sizes}"
  )


def rounds(pair: TargetDraftPair, workload: Workload) -> str:
  """Lists where a baseline round and the best round spend their time."""
  curve, context = workload.curve, workload.context
  best = workload.best(pair, 1).k
  header = ["part", "times", "term", "MB", "GFLOP", "MB sent", "ms"]
  texts = []
  for k in sorted({0, best or len(curve)}):
    cost = pair.round(1, k, context)
    one = theory.latency(curve[:k], cost.seconds)
    texts += [
      f"\na round of k = {k}, batch 1, context {context}",
      columns(header, prediction.explain(cost)),
      f"  {theory.expected_tokens(curve[:k]):.2f} tokens in "
      f"{1e3 * cost.seconds:.3f} ms; a token of a text of 128 takes "
      f"{1e3 * one.mean:.3f} ms in the mean, {1e3 * one.p99:.3f} ms in one "
      "text of a hundred",
    ]
  return "\n".join(texts)


def plans(pair: TargetDraftPair, workload: Workload) -> str:
  """Lists best k, break-even, equal memory and schedules for engines."""
  return "\n".join(
    [
      "\nbest k and its speedup; -: does not fit",
      _best_k(pair, workload),
      *_break_even(pair, workload),
      *_equal_memory(pair, workload),
      *_schedules(pair, workload),
    ]
  )


def _best_k(pair: TargetDraftPair, workload: Workload) -> str:
  def entry(batch: int, context: int) -> str:
    if not fits(pair, batch, context):
      return "-"
    best = workload.best(pair, batch, context)
    return f"{best.k}: {best.speedup:.2f}"

  header = ["batch \\ context", *map(str, workload.contexts)]
  lines = [
    [str(batch), *(entry(batch, context) for context in workload.contexts)]
    for batch in workload.batches
  ]
  return columns(header, lines)


def _break_even(pair: TargetDraftPair, workload: Workload) -> list[str]:
  acceptance, most = workload.acceptance, workload.most
  where = f"\nat context {workload.context}"
  batch = planning.break_even_batch(pair, workload.context, acceptance, most)
  if batch is None:
    return [f"{where} some k pays at batch 4096 still"]
  lines = [f"{where} no k pays from batch {batch} on"]
  context = planning.break_even_context(pair, batch, acceptance, most)
  if context:
    lines.append(f"at batch {batch} it pays from context {context} on")
  return lines


def _equal_memory(pair: TargetDraftPair, workload: Workload) -> list[str]:
  if not np.isfinite(pair.target.chip.memory):  # some machines do not report it
    return []
  drafting, alone = planning.at_equal_memory(
    pair, workload.context, workload.acceptance, workload.most
  )
  return [
    f"as many rows as fit {name}: {one.batch}, with k = {one.k} "
    f"{one.tokens_per_second:,.0f} tokens/s, "
    f"{1e3 * one.seconds_per_token:.1f} ms a token"
    for name, one in (("with the drafter", drafting), ("without it", alone))
  ]


def _schedules(pair: TargetDraftPair, workload: Workload) -> list[str]:
  largest = _LARGEST
  if np.isfinite(pair.target.chip.memory):
    largest = min(largest, planning.largest_batch(pair, workload.context))
  batch_ranges = planning.schedule(
    pair, workload.context, workload.acceptance, workload.most, largest
  )
  try:
    tensorrt = json.dumps(planning.as_tensorrt_llm(batch_ranges))
  except ValueError as error:
    tensorrt = str(error)
  vllm = json.dumps(planning.as_vllm(batch_ranges))
  return [f"vLLM: {vllm}", f"TensorRT-LLM: {tensorrt}"]


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
  baseline = pair.baseline(1, workload.context).seconds
  levels = len(tree.paths[-1]) if tree.paths else 0
  return (
    f"best tree at batch 1: {len(tree.paths)} draft tokens in {levels} "
    f"levels, {tree.tokens:.2f} tokens in {1e3 * tree.seconds:.2f} ms, "
    f"{tree.tokens * baseline / tree.seconds:.2f} times autoregressive decoding"
  )
