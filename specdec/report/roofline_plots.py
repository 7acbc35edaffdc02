"""Plots predictions over k, batch, context, draft size and chip; their table.

Speedups are nan, and cells '-', where memory does not suffice.
"""

import csv
import dataclasses
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec.benchmark.scenario import Scenario
from specdec.report import canvas, heatmaps
from specdec.report.roofline import Workload, fits, gain, pairs_of
from specdec.roofline import planning, theory
from specdec.roofline.chips import Chip
from specdec.roofline.round_cost import TargetDraftPair
from specdec.utils import files

_RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_COLUMNS = (
  "chip", "target", "draft", "batch", "context", "k", "fits",
  "tokens_per_round", "round_ms", "baseline_ms", "speedup", "tokens_per_second",
  "ms_per_token", "p99_ms_per_token",
)  # fmt: skip


def write_cells(path: Path, scenario: Scenario, workload: Workload) -> None:
  """Writes every batch, context and k as CSV."""
  pair, curve, most = scenario.pair, workload.curve, workload.most
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(_COLUMNS)
  names = scenario.deployment.chip.name, scenario.target, scenario.drafter
  for where in itertools.product(workload.batches, workload.contexts):
    points = planning.sweep_k(pair, *where, workload.acceptance, most)
    for k, tokens, seconds, speedup in points:
      one = theory.latency(curve[:k], seconds)
      milliseconds = 1e3 * seconds, 1e3 * points[0].seconds
      speeds = speedup, where[0] * tokens / seconds
      numbers = tokens, *milliseconds, *speeds, 1e3 * one.mean, 1e3 * one.p99
      cells = (f"{x:.6g}" for x in numbers)
      writer.writerow([*names, *where, k, fits(pair, *where), *cells])
  files.replace_file(path, file.getvalue())


def draw(
  folder: Path,
  scenario: Scenario,
  workload: Workload,
  others: Sequence[Chip] = (),
  drafts: Sequence[str] = (),
  draft_acceptance: theory.PowerLaw | None = None,
) -> None:
  """Writes the pictures into a folder: also of other chips, and of draft models
  by their names, if any, and their acceptance by size."""
  pair, deployment = scenario.pair, scenario.deployment
  curve, context = workload.curve, workload.context
  where = f"{scenario.num_chips} x {deployment.chip.name}, {deployment.weights}"
  both = f"{scenario.target} with {scenario.drafter}"
  title, rate = f"{both} on {where}", "given prefix acceptance"
  if np.ndim(workload.acceptance) == 0:
    rate = f"alpha {workload.acceptance:g}"

  iid, longest = theory.iid_prefix_acceptance, len(curve)

  def heatmap(
    name, value, points, label, panel, title=title, names=None, most=longest
  ):
    """Plots value(k, point) for k = 0..most."""
    ks = range(most + 1)
    values = np.array([[value(k, x) for x in points] for k in ks])
    if np.any(np.isnan(values)):
      panel += "; -: does not fit"
    figure = heatmaps.speedups(
      {panel: values}, names or points, ks, (label, "k"), title
    )
    canvas.save(figure, folder / name)

  heatmap(
    "k_batch.png",
    lambda k, batch: gain(pair, batch, context, curve[:k]),
    workload.batches,
    "batch, rows",
    f"context {context}, {rate}",
  )
  heatmap(
    "k_context.png",
    lambda k, size: gain(pair, 1, size, curve[:k]),
    workload.contexts,
    "context, positions",
    f"batch 1, {rate}",
  )
  one_row = f"batch 1, context {context}"
  heatmap(
    "k_acceptance.png",
    lambda k, alpha: gain(pair, 1, context, iid(alpha, k)),
    _RATES,
    "share of draft tokens accepted",
    one_row,
  )
  if drafts:
    pairs = [
      dataclasses.replace(scenario, drafter=f"model({name})").pair
      for name in drafts
    ]
    sizes = [one.draft.shape.num_parameters for one in pairs]
    rates = [draft_acceptance.alpha(size) for size in sizes]
    heatmap(
      "k_draft.png",
      lambda k, i: gain(pairs[i], 1, context, iid(rates[i], k)),
      range(len(pairs)),
      "draft's parameters, and the share of its tokens accepted, by its size",
      one_row,
      f"{scenario.target} and a draft model on {where}",
      most=workload.most,
      names=[f"{s / 1e9:.3g} B\n{rate:.2f}" for s, rate in zip(sizes, rates)],
    )
  figure = heatmaps.over_batch(
    _by_chip(scenario, workload, others),
    workload.batches,
    f"{both}, {rate}; {scenario.num_chips} chips, {deployment.weights}, "
    f"context {context}",
  )
  canvas.save(figure, folder / "chips.png")
  roofs = {}
  for chip in (deployment.chip, *others):
    dtype = dataclasses.replace(deployment, chip=chip).dtype
    roofs.setdefault(chip.name, (chip.bandwidth, chip.rate(dtype)))
  figure = heatmaps.roofline(
    roofs, _passes(pair, workload), f"{title}, context {context}, one chip"
  )
  canvas.save(figure, folder / "roofline.png")


def _by_chip(
  scenario: Scenario, workload: Workload, others: Sequence[Chip]
) -> dict[str, list[tuple[float, float]]]:
  """Returns chip -> (speedup, k) of every batch, nan where it does not fit."""
  curves = {}
  for name, pair in pairs_of(scenario, others).items():
    points = []
    for batch in workload.batches:
      best = workload.best(pair, batch)
      fit = fits(pair, batch, workload.context)
      points.append((best.speedup, best.k) if fit else (np.nan, np.nan))
    nowhere = np.all(np.isnan(points))
    curves[name + (": does not fit" if nowhere else "")] = points
  return curves


def _passes(
  pair: TargetDraftPair, workload: Workload
) -> dict[str, list[tuple[float, float, str]]]:
  """Returns passes -> (FLOP/byte, FLOP/s, batch) of some batches."""
  k, batches = workload.most, workload.batches
  some = dict.fromkeys((batches[0], batches[len(batches) // 2], batches[-1]))
  passes = {
    "autoregressive decoding": (pair.target, 1),
    f"verification, k = {k}": (pair.target, k + 1),
  }
  if pair.draft is not None:
    passes["draft"] = (pair.draft, 1)
  points = {}
  for name, (deployment, tokens) in passes.items():
    costs = [deployment.cost(b, tokens, workload.context) for b in some]
    points[f"{name},\nbatch {', '.join(map(str, some))}"] = [
      (cost.flops / cost.bytes, cost.flops / cost.seconds, str(batch))
      for batch, cost in zip(some, costs)
    ]
  return points
