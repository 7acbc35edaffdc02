"""Plots predictions over k, batch, context, draft size and chip; their table.

Speedups are nan, and cells '-', where memory does not suffice.
"""

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specdec.benchmark.scenario import Scenario
from specdec.report import canvas, heatmaps
from specdec.report.roofline import Workload, fits, gain
from specdec.roofline import theory
from specdec.roofline.chips import Chip
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import files

_RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_COLUMNS = (
  "chip", "target", "draft", "batch", "context", "k", "fits",
  "tokens_per_round", "round_ms", "baseline_ms", "speedup", "tokens_per_second",
  "ms_per_token", "p99_ms_per_token",
)  # fmt: skip


def write_cells(path: Path, scenario: Scenario, workload: Workload) -> None:
  """Writes every batch, context and k as CSV."""
  pair, curve = scenario.pair, workload.curve
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(_COLUMNS)
  names = scenario.chip.name, scenario.target, scenario.drafter
  for batch in workload.batches:
    for context in workload.contexts:
      baseline = pair.baseline(batch, context).seconds
      for k in range(len(curve) + 1):
        tokens = theory.expected_tokens(curve[:k])
        seconds = pair.round(batch, k, context).seconds
        one = theory.latency(curve[:k], seconds)
        numbers = (
          tokens,
          1e3 * seconds,
          1e3 * baseline,
          tokens * baseline / seconds,
          batch * tokens / seconds,
          1e3 * one.mean,
          1e3 * one.p99,
        )
        point = batch, context, k, fits(pair, batch, context)
        writer.writerow([*names, *point, *(f"{x:.6g}" for x in numbers)])
  files.replace_file(path, file.getvalue())


def draw(
  folder: Path,
  scenario: Scenario,
  workload: Workload,
  others: Sequence[Chip] = (),
  drafts: Sequence[str] = (),
  draft_acceptance: theory.PowerLaw | None = None,
) -> None:
  """Writes the pictures into a folder.

  Args:
    others: chips to set beside the scenario's.
    drafts: names of draft models to compare; () leaves that picture out.
    draft_acceptance: their acceptance by size.
  """
  where = f"{scenario.num_chips} x {scenario.chip.name}, {scenario.weights}"
  title = f"{scenario.target} with {scenario.drafter} on {where}"
  rate = "given prefix acceptance"
  if np.ndim(workload.acceptance) == 0:
    rate = f"alpha {workload.acceptance:g}"
  draw_k(folder, scenario.pair, workload, title, rate)
  if drafts:
    title_of_sizes = f"{scenario.target} and a draft model on {where}"
    path = folder / "k_draft.png"
    draw_drafts(
      path, scenario, workload, drafts, draft_acceptance, title_of_sizes
    )
  what = f"{scenario.target} with {scenario.drafter}, {rate}"
  draw_chips(folder / "chips.png", scenario, workload, others, what)
  draw_roofline(folder / "roofline.png", scenario.pair, workload, others, title)


def _heatmap(
  path: Path,
  value: Callable,
  points: Sequence,
  num_k: int,
  label: str,
  panel: str,
  title: str,
  names: Sequence | None = None,
) -> None:
  """Plots value(k, point) for k = 0..num_k."""
  values = np.array([[value(k, x) for x in points] for k in range(num_k + 1)])
  if np.any(np.isnan(values)):
    panel += "; -: does not fit"
  labels, ks = (label, "k"), range(num_k + 1)
  figure = heatmaps.speedups(
    {panel: values}, names or points, ks, labels, title
  )
  canvas.save(figure, path)


def draw_k(
  folder: Path, pair: TargetDraftPair, workload: Workload, title, rate
) -> None:
  """Plots speedup by k and batch, context, acceptance."""
  curve, context = workload.curve, workload.context
  for name, value, points, label, panel in (
    (
      "k_batch",
      lambda k, batch: gain(pair, batch, context, curve[:k]),
      workload.batches,
      "batch, rows",
      f"context {context}, {rate}",
    ),
    (
      "k_context",
      lambda k, size: gain(pair, 1, size, curve[:k]),
      workload.contexts,
      "context, positions",
      f"batch 1, {rate}",
    ),
    (
      "k_acceptance",
      lambda k, alpha: gain(
        pair, 1, context, theory.iid_prefix_acceptance(alpha, k)
      ),
      _RATES,
      "share of draft tokens accepted",
      f"batch 1, context {context}",
    ),
  ):
    path = folder / f"{name}.png"
    _heatmap(path, value, points, len(curve), label, panel, title)


def draw_drafts(
  path: Path,
  scenario: Scenario,
  workload: Workload,
  drafts: Sequence[str],
  acceptance: theory.PowerLaw,
  title: str,
) -> None:
  """Plots speedup by k and draft size, with acceptance by size."""
  pairs = [
    dataclasses.replace(scenario, drafter=f"model({name})").pair
    for name in drafts
  ]
  sizes = [pair.draft.shape.num_parameters for pair in pairs]
  rates = [acceptance.alpha(size) for size in sizes]

  def value(k: int, i: int) -> float:
    curve = theory.iid_prefix_acceptance(rates[i], k)
    return gain(pairs[i], 1, workload.context, curve)

  _heatmap(
    path,
    value,
    range(len(pairs)),
    workload.most,
    "draft's parameters, and the share of its tokens accepted, by its size",
    f"batch 1, context {workload.context}",
    title,
    [f"{s / 1e9:.3g} B\n{rate:.2f}" for s, rate in zip(sizes, rates)],
  )


def draw_chips(
  path: Path,
  scenario: Scenario,
  workload: Workload,
  others: Sequence[Chip],
  what: str,
) -> None:
  """Plots the best speedup over the batch, chip by chip."""
  pairs = {scenario.chip.name: scenario.pair}
  for chip in others:
    pairs.setdefault(chip.name, scenario.on(chip).pair)
  curves = {}
  for name, pair in pairs.items():
    points = []
    for batch in workload.batches:
      best = workload.best(pair, batch)
      fit = fits(pair, batch, workload.context)
      points.append((best.speedup, best.k) if fit else (np.nan, np.nan))
    nowhere = np.all(np.isnan(points))
    curves[name + (": does not fit" if nowhere else "")] = points
  title = (
    f"{what}; {scenario.num_chips} chips, {scenario.weights}, context "
    f"{workload.context}"
  )
  canvas.save(heatmaps.over_batch(curves, workload.batches, title), path)


def draw_roofline(
  path: Path,
  pair: TargetDraftPair,
  workload: Workload,
  others: Sequence[Chip],
  title: str,
) -> None:
  """Plots passes of one chip beneath its roofline."""
  k, batches = workload.most, workload.batches
  some = batches[0], batches[len(batches) // 2], batches[-1]
  some = list(dict.fromkeys(some))
  shown = f"batch {', '.join(map(str, some))}"
  passes = {
    f"autoregressive decoding,\n{shown}": (pair.target, 1),
    f"verification, k = {k},\n{shown}": (pair.target, k + 1),
  }
  if pair.draft is not None:
    passes[f"draft,\n{shown}"] = (pair.draft, 1)
  points = {}
  for name, (deployment, tokens) in passes.items():
    points[name] = []
    for batch in some:
      cost = deployment.cost(batch, tokens, workload.context)
      rate = cost.flops / cost.seconds
      points[name].append((cost.flops / cost.bytes, rate, str(batch)))
  roofs = {}
  for chip in (pair.target.chip, *others):
    dtype = dataclasses.replace(pair.target, chip=chip).dtype
    roofs.setdefault(chip.name, (chip.bandwidth, chip.rate(dtype)))
  title = f"{title}, context {workload.context}, one chip"
  canvas.save(heatmaps.roofline(roofs, points, title), path)
