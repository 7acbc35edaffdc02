"""Pictures and cells of roofline.py."""

import csv
import dataclasses
import io
from pathlib import Path

import _priced
import numpy as np
from _priced import gain
from absl import flags

from specdec.report import heatmaps
from specdec.roofline import planning, theory
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import files

_CELL = (
  "chip", "target", "draft", "batch", "context", "k", "fits",
  "tokens_per_round", "round_ms", "baseline_ms", "speedup", "tokens_per_second",
  "ms_per_token", "p99_ms_per_token",
)  # fmt: skip
FLAGS = flags.FLAGS


def grid(rows, columns_, value) -> np.ndarray:
  return np.array([[value(row, column) for column in columns_] for row in rows])


def write_cells(
  path: Path, pair: TargetDraftPair, prefix_acceptance, batches, contexts
) -> None:
  """Every batch, context and k."""
  curve = planning.curve(prefix_acceptance, FLAGS.most)
  file = io.StringIO()
  writer = csv.writer(file)
  writer.writerow(_CELL)
  for batch in batches:
    for context in contexts:
      baseline = pair.baseline(batch, context).seconds
      fits = not np.isnan(gain(pair, batch, context, ()))
      for k in range(len(curve) + 1):
        tokens = theory.expected_tokens(curve[:k])
        seconds = pair.round(batch, k, context).seconds
        one = theory.latency(curve[:k], seconds)
        writer.writerow(
          [
            pair.target.chip.name,
            FLAGS.target,
            FLAGS.draft if FLAGS.exit_layer is None else FLAGS.exit_layer,
            batch,
            context,
            k,
            fits,
            *(
              f"{x:.6g}"
              for x in (
                tokens,
                1e3 * seconds,
                1e3 * baseline,
                tokens * baseline / seconds,
                batch * tokens / seconds,
                1e3 * one.mean,
                1e3 * one.p99,
              )
            ),
          ]
        )
  files.replace_file(path, file.getvalue())


def draw(
  folder: Path,
  known,
  pair: TargetDraftPair,
  prefix_acceptance,
  batches,
  contexts,
) -> None:
  """The pictures."""
  where = f"{FLAGS.ways * FLAGS.replicas} x {pair.target.chip.name}"
  where += f", {FLAGS.weights}"
  who = f"{FLAGS.target} + {FLAGS.draft}"
  if FLAGS.exit_layer is not None:
    who = f"{FLAGS.target}, exit after layer {FLAGS.exit_layer}"
  title = f"{who} on {where}"
  rate = (
    "given prefix_acceptance"
    if FLAGS.prefix_acceptance
    else f"alpha {FLAGS.alpha:g}"
  )
  draw_grids(folder, pair, title, rate, prefix_acceptance, batches, contexts)
  if FLAGS.exit_layer is None and FLAGS.draft != "none" and not known:
    draw_drafts(folder, pair, f"{FLAGS.target} and a draft on {where}")
  draw_chips(folder, pair, f"{who}, {rate}", prefix_acceptance, batches)
  draw_roof(folder / "roofline.png", pair, batches, title)


def heatmap(path: Path, values, columns_, label: str, shown: str, title: str):
  """k by something."""
  if np.any(np.isnan(values)):
    shown += "; -: does not fit"
  ks = range(len(values))
  heatmaps.speedups({shown: values}, columns_, ks, (label, "k"), path, title)


def draw_grids(
  folder, pair, title, rate, prefix_acceptance, batches, contexts
) -> None:
  """k by batch, by context, by acceptance."""
  curve = planning.curve(prefix_acceptance, FLAGS.most)
  ks, context = range(len(curve) + 1), FLAGS.context
  rates = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
  by_batch = grid(ks, batches, lambda k, b: gain(pair, b, context, curve[:k]))
  by_context = grid(ks, contexts, lambda k, s: gain(pair, 1, s, curve[:k]))
  by_rate = grid(
    ks,
    rates,
    lambda k, a: gain(pair, 1, context, theory.iid_prefix_acceptance(a, k)),
  )
  for name, values, columns_, label, shown in (
    ("k_batch", by_batch, batches, "batch, rows",
     f"context {context}, {rate}"),
    ("k_context", by_context, contexts, "context, positions",
     f"batch 1, {rate}"),
    ("k_acceptance", by_rate, rates, "share of draft tokens kept",
     f"batch 1, context {context}"),
  ):  # fmt: skip
    heatmap(folder / f"{name}.png", values, columns_, label, shown, title)


def draw_drafts(folder: Path, pair: TargetDraftPair, title: str) -> None:
  """k by draft size, by the distribution of acceptance."""
  distribution = _priced.distribution_of()
  made = [
    _priced.pair_on(pair.target.chip, draft=name) for name in FLAGS.drafts
  ]
  sizes = [one.draft.shape.num_parameters for one in made]
  rates = [distribution.alpha(size) for size in sizes]
  values = grid(
    range(FLAGS.most + 1),
    range(len(made)),
    lambda k, i: gain(
      made[i], 1, FLAGS.context, theory.iid_prefix_acceptance(rates[i], k)
    ),
  )
  labels = [f"{s / 1e9:.3g} B\n{rate:.2f}" for s, rate in zip(sizes, rates)]
  label = (
    "draft's parameters, and the share kept by the distribution of draft size"
  )
  shown = f"batch 1, context {FLAGS.context}"
  heatmap(folder / "k_draft.png", values, labels, label, shown, title)


def draw_chips(
  folder: Path, pair: TargetDraftPair, who: str, prefix_acceptance, batches
) -> None:
  """Chips side by side."""
  curves = {}
  for name in dict.fromkeys([FLAGS.chip, *FLAGS.chips]):
    one = pair if name == FLAGS.chip else _priced.pair_on(_priced.chip_of(name))
    points = []
    for batch in batches:
      best = planning.best_k(
        one, batch, FLAGS.context, prefix_acceptance, FLAGS.most
      )
      fits = not np.isnan(gain(one, batch, FLAGS.context, ()))
      points.append((best.speedup, best.k) if fits else (np.nan, np.nan))
    nowhere = np.all(np.isnan(points))
    label = one.target.chip.name + (": does not fit" if nowhere else "")
    curves[label] = points
  heatmaps.over_batch(
    curves,
    batches,
    folder / "chips.png",
    f"{who}; {FLAGS.ways * FLAGS.replicas} chips, {FLAGS.weights}, context "
    f"{FLAGS.context}",
  )


def draw_roof(path: Path, pair: TargetDraftPair, batches, title: str) -> None:
  """Passes of one chip beneath its roof."""
  k = FLAGS.most
  some = batches[0], batches[len(batches) // 2], batches[-1]
  shown = f"batch {some[0]}, {some[1]}, {some[2]}"
  kinds = {
    f"autoregressive decoding,\n{shown}": (pair.target, 1),
    f"verification, k = {k},\n{shown}": (pair.target, k + 1),
  }
  if pair.draft is not None:
    kinds[f"draft,\n{shown}"] = (pair.draft, 1)
  points = {}
  for name, (deployment, tokens) in kinds.items():
    points[name] = []
    for batch in some:
      cost = deployment.cost(batch, tokens, FLAGS.context)
      rate = cost.flops / cost.seconds
      points[name].append((cost.flops / cost.bytes, rate, str(batch)))
  chip = pair.target.chip
  roofs = {chip.name: (chip.bandwidth, chip.rate(pair.target.dtype))}
  for name in FLAGS.chips:
    other = _priced.chip_of(name)
    kind = dataclasses.replace(pair.target, chip=other).dtype
    roofs[name] = (other.bandwidth, other.rate(kind))
  heatmaps.roofline(
    roofs, points, path, f"{title}, context {FLAGS.context}, one chip"
  )
