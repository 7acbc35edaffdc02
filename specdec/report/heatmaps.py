"""Plots predictions: speedup heatmaps, curves over batch, the roofline.

Invariant: speedup 1 is white, below is orange, above is purple, and every cell
prints its number.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colors, patches, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.report import canvas


def speedups(
  panels: Mapping[str, np.ndarray],
  columns: Sequence,
  rows: Sequence,
  labels: tuple[str, str],
  title: str,
) -> Figure:
  """Plots stacked heatmaps of speedups; frames the best of each column.

  Args:
    panels: name -> speedups [rows, columns]; nan where memory does not suffice.
    columns, rows: values along the axes.
    labels: of the column axis and of the row axis.
  """
  marks = [_short(column) for column in columns]
  panels = {canvas.label(name, 80): table for name, table in panels.items()}
  extra = max(mark.count("\n") for mark in marks)
  extra += max(name.count("\n") for name in panels)
  height = (0.75 + 0.17 * extra + 0.3 * len(rows)) * len(panels) + 0.3
  figure, axes = canvas.figure(height, title, (), 1, len(panels))
  values = np.concatenate([np.ravel(v) for v in panels.values()])
  most = max(1.5, float(np.nanmax(values, initial=1.0)))
  least = min(0.7, float(np.nanmin(values, initial=1.0)))
  norm = colors.TwoSlopeNorm(1.0, least, most)
  for one, (name, table) in zip(axes, panels.items()):
    one.imshow(table, cmap="PuOr", norm=norm, aspect="auto", origin="lower")
    one.set_xticks(range(len(columns)), marks)
    one.set_yticks(range(len(rows)), [_short(r) for r in rows])
    one.tick_params(length=0)
    one.set_xlabel(labels[0])
    one.set_ylabel(labels[1])
    one.set_title(name, loc="left", fontsize=10)
    for i, j in np.ndindex(table.shape):
      _cell(one, i, j, table[i, j], norm)
    for j in np.flatnonzero(np.isfinite(table).any(0)):
      corner = j - 0.5, np.nanargmax(table[:, j]) - 0.5
      frame = patches.Rectangle(
        corner, 1, 1, fill=False, linewidth=2, clip_on=False
      )
      one.add_patch(frame)
  return figure


def _cell(axes: Axes, row: int, column: int, value: float, norm) -> None:
  text = f"{value:.2f}" if np.isfinite(value) else "-"
  place = float(norm(value)) if np.isfinite(value) else 0.5
  color = "white" if abs(place - 0.5) > 0.36 else "black"
  style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": color}
  axes.text(column, row, text, **style)


def _short(value) -> str:
  """Formats a tick: 4096 as 4k."""
  if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
    return f"{value // 1024}k"
  return canvas.label(value, 22) if isinstance(value, str) else f"{value:g}"


def over_batch(
  curves: Mapping[str, Sequence[tuple[float, int]]],
  batches: Sequence[int],
  title: str,
) -> Figure:
  """Plots the best speedup, and its k, over the batch, a curve of both for each
  name (of a chip, say)."""
  figure, axes = canvas.figure(max(3.4, 0.32 * len(curves)), title, (), 2)
  for i, (name, points) in enumerate(curves.items()):
    look = canvas.style(i) | {"markersize": 4, "label": canvas.label(name)}
    for one, values in zip(axes, zip(*points)):
      one.plot(batches, values, **look)
  for one in axes:
    canvas.log2(one)
    one.set_xlabel("batch, rows")
  canvas.level(axes[0])
  axes[0].set_ylabel("best speedup over the baseline, times")
  axes[1].set_ylabel("k that gives it; 0: the baseline")
  axes[1].yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  canvas.legend(axes[1])
  return figure


def roofline(
  roofs: Mapping[str, tuple[float, float]],
  points: Mapping[str, Sequence[tuple[float, float, str]]],
  title: str,
) -> Figure:
  """Plots a roofline: FLOP/s over arithmetic intensity.

  Args:
    roofs: chip -> (bytes/s, FLOP/s).
    points: kind of pass -> (FLOP/byte, FLOP/s, short label).
  """
  figure, [axes] = canvas.figure(4.4, title, (), 1)
  intensities = [x for passes in points.values() for x, _, _ in passes]
  ridges = [peak / rate for rate, peak in roofs.values()]
  low, high = min([*intensities, 0.5]), max([*intensities, *ridges])
  span = np.geomspace(low / 2, 4 * high, 200)
  for i, (name, (rate, peak)) in enumerate(roofs.items()):
    axes.plot(
      span,
      np.minimum(span * rate, peak) / 1e12,
      label=canvas.label(
        f"{name}: {rate / 1e9:,.0f} GB/s,\n{peak / 1e12:,.4g} TFLOP/s"
      ),
      color="black" if i == 0 else canvas.GRAY,
      linestyle=canvas.LINES[i % len(canvas.LINES)],
    )
  for i, (name, passes) in enumerate(points.items()):
    x, y, words = zip(*passes)
    y = np.array(y) / 1e12
    look = canvas.style(i) | {"linewidth": 0.8, "label": canvas.label(name)}
    axes.plot(x, y, **look)
    for place, word in zip(zip(x, y), words):
      axes.annotate(
        word,
        place,
        xytext=((5, -9), (-3, 6), (-3, -14))[i % 3],
        textcoords="offset points",
        fontsize=8,
        color=look["color"],
      )
  axes.set_xscale("log")
  axes.set_yscale("log")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter("{x:g}")
  axes.set_xlabel("arithmetic intensity, FLOP/byte")
  axes.set_ylabel("TFLOP/s")
  canvas.legend(axes)
  return figure
