"""Plots a sweep: predictions and measurements.

Invariant: predictions are dashed and hollow, measurements solid and filled,
with error bars.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from specdec.benchmark import sweeps
from specdec.report import canvas, heatmaps


def over_k(lines: Sequence[dict], title: str) -> Figure:
  """Plots speedup over k, one colour per batch."""
  figure, [axes] = canvas.figure(3.6, title, (), 1)
  batches = sorted({line["run"]["batch"] for line in lines})
  for i, batch in enumerate(batches):
    group = [line for line in lines if line["run"]["batch"] == batch]
    ks = [line["run"]["k"] for line in group]
    measured = [line["run"]["speed"]["speedup"] for line in group]
    style = {
      "color": canvas.COLORS[i % len(canvas.COLORS)],
      "marker": canvas.MARKERS[i % len(canvas.MARKERS)],
      "markersize": 5,
    }
    axes.errorbar(
      ks,
      [m["value"] for m in measured],
      [m["error"] or 0 for m in measured],
      label=f"batch {batch}, measured",
      **style,
      **canvas.BARS,
    )
    axes.plot(
      ks,
      [line["prediction"]["speedup"] for line in group],
      linestyle="--",
      markerfacecolor="none",
      label=f"batch {batch}, predicted",
      **style,
    )
  _finish(axes, "k, drafted tokens a round", "speedup over autoregressive")
  return figure


def prefix_acceptance(lines: Sequence[dict], title: str) -> Figure:
  """Plots the prefix acceptance of each setting's largest k."""
  figure, [axes] = canvas.figure(3.6, title, (), 1)
  for i, (name, group) in enumerate(sweeps.by_setting(lines).items()):
    line = max(group, key=lambda x: x["run"]["k"])
    curve = line["observed"]["prefix_acceptance"]
    axes.plot(
      range(1, len(curve) + 1),
      curve,
      color=canvas.COLORS[i % len(canvas.COLORS)],
      marker=canvas.MARKERS[i % len(canvas.MARKERS)],
      linestyle=canvas.LINES[i // len(canvas.COLORS) % len(canvas.LINES)],
      markersize=4,
      label=canvas.label(name.replace("; ", "\n", 1)),
    )
  axes.set_ylim(0, 1)
  _finish(
    axes, "i, position in the draft", "rounds that accept draft tokens 1 to i"
  )
  return figure


def scatter(lines: Sequence[dict], title: str) -> Figure:
  """Plots measured against predicted speedup, with a band of 10 %."""
  figure, [axes] = canvas.figure(4.2, title, (), 1)
  speedups = [line["prediction"]["speedup"] for line in lines]
  speedups += [line["run"]["speed"]["speedup"]["value"] for line in lines]
  low, high = 0.8 * min(speedups), 1.2 * max(speedups)
  span = np.geomspace(low, high, 50)
  axes.fill_between(
    span, 0.9 * span, 1.1 * span, color=canvas.GRAY, alpha=0.2, linewidth=0,
    label="within 0.90 to 1.10",
  )  # fmt: skip
  axes.plot(span, span, color=canvas.GRAY, linewidth=1)
  for i, (name, group) in enumerate(sweeps.by_setting(lines).items()):
    measured = [line["run"]["speed"]["speedup"] for line in group]
    axes.errorbar(
      [line["prediction"]["speedup"] for line in group],
      [m["value"] for m in measured],
      [m["error"] or 0 for m in measured],
      linestyle="none",
      color=canvas.COLORS[i % len(canvas.COLORS)],
      marker=canvas.MARKERS[i % len(canvas.MARKERS)],
      markersize=4,
      label=canvas.label(name.replace("; ", "\n", 1)),
      **canvas.BARS,
    )
  axes.set_xscale("log")
  axes.set_yscale("log")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xlabel("predicted speedup, times")
  axes.set_ylabel("measured speedup, times")
  canvas.legend(axes)
  return figure


def heatmap(
  lines: Sequence[dict], column: str, title: str, label: str
) -> Figure:
  """Plots measured and predicted speedup over k and `column`.

  Args:
    column: "batch" or "drafter".
    label: of the column axis.
  """

  def place(line):
    return line["run"]["batch"] if column == "batch" else line[column]

  columns = list(dict.fromkeys(map(place, lines)))  # in the sweep's order
  ks = sorted({line["run"]["k"] for line in lines})
  tables = {
    name: np.full((len(ks), len(columns)), math.nan)
    for name in ("measured", "predicted")
  }
  for line in lines:
    where = ks.index(line["run"]["k"]), columns.index(place(line))
    tables["measured"][where] = line["run"]["speed"]["speedup"]["value"]
    tables["predicted"][where] = line["prediction"]["speedup"]
  return heatmaps.speedups_figure(tables, columns, ks, (label, "k"), title)


def _finish(axes, x: str, y: str) -> None:
  if "speedup" in y:
    axes.axhline(1, color=canvas.GRAY, linewidth=1, linestyle=":", zorder=0.5)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  canvas.legend(axes)
