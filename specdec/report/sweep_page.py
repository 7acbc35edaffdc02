"""Renders a sweep as one HTML page: curves, heatmaps, a sortable table.

Invariant: in figures predictions are dashed and hollow, measurements solid and
filled, with error bars.
"""

import base64
import io
import math
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.benchmark import sweeps
from specdec.report import canvas, heatmaps, html

# Inches, for the 358 pixels between a phone's margins: a figure's smallest text
# (8.5 points) is then 9 pixels high, usual text 11.
_WIDTH = 4.6


def render(sweep: sweeps.Read, header: dict | None) -> str:
  """Renders the page; the header names command, machine and versions."""
  lines = sweep.lines
  settings = sweeps.by_setting(lines)
  return html.render(
    "sweep_page.html",
    header=header,
    lines=lines,
    drafted=[line for line in lines if line["run"]["k"]],
    caveats=sorted({text for line in lines for text in line["caveats"]}),
    settings=settings,
    band=sweeps.band,
    crossover=sweeps.crossover,
    images_of={name: _svg(x) for name, x in figures(lines).items()},
    rows=[
      _row(name, line) for name, group in settings.items() for line in group
    ],
    left_out=[
      *(f"skipped: {text}" for text in sweep.broken),
      *(f"failed: {x['point']}: {x['error']}" for x in sweep.failed),
    ],
  )


def _row(name: str, line: dict) -> dict[str, tuple[object, str]]:
  """Returns a point's row of the table: heading -> value and format."""
  run, prediction = line["run"], line["prediction"]
  speed, acceptance = run["speed"], run["acceptance"]
  formula, error = sweeps.by_formula(line), speed["speedup"]["error"]
  return {
    "setting": (name, "{}"),
    "batch": (run["batch"], "{}"),
    "k": (run["k"], "{}"),
    "tokens/pass": (acceptance["tokens_per_pass"]["value"], "{:.2f}"),
    "by alpha, c": (formula or 0, "-" if formula is None else "{:.2f}"),
    "predicted": (prediction["speedup"], "{:.2f}"),
    "measured": (speed["speedup"]["value"], "{:.2f}"),
    "error": (error or 0, "-" if error is None else "{:.2f}"),
    "measured / predicted": (sweeps.ratio(line), "{:.2f}"),
    "round, ms": (1e3 * speed["seconds"] / line["rounds"], "{:.2f}"),
    "predicted, ms": (1e3 * prediction["round_seconds"], "{:.2f}"),
    "tokens/s": (speed["tokens_per_second"], "{:.1f}"),
    "load": (line["load"] or 0, "{:.2f}"),
  }


def _svg(figure: Figure) -> str:
  """Returns a figure, a phone wide and legends below the panels, in base64."""
  height = figure.get_figheight()
  for axes in figure.axes:
    if legend := axes.get_legend():
      legend.set_loc("upper left")
      legend.set_bbox_to_anchor((0, -0.2), axes.transAxes)
      lines = "\n".join(text.get_text() for text in legend.get_texts())
      height += 0.18 * (1 + lines.count("\n"))
  before = figure.get_suptitle()
  title = textwrap.fill(before, 42)
  height += 0.2 * (title.count("\n") - before.count("\n"))
  figure.set_size_inches(_WIDTH, height)
  figure.suptitle(title, fontsize=11)
  buffer = io.BytesIO()
  figure.savefig(buffer, format="svg", transparent=True)
  return base64.b64encode(buffer.getvalue()).decode()


def figures(lines: Sequence[dict]) -> dict[str, Figure]:
  """Returns the page's figures by name."""
  drafted = [line for line in lines if line["run"]["k"]] or list(lines)
  drawn = {"scatter": _scatter(drafted)}
  for i, (name, group) in enumerate(sweeps.by_setting(lines).items()):
    drawn[f"over_k_{i}"] = _over_k(group, name)
    batches = [line["run"]["batch"] for line in group]
    if len(set(batches)) > 1:
      drawn[f"heatmap_{i}"] = _heatmap(group, batches, name, "batch, rows")
  for i, (name, group) in enumerate(sweeps.by_drafter(lines).items()):
    drafters = [line["drafter"] for line in group]
    drawn[f"drafters_{i}"] = _heatmap(group, drafters, name, "drafter")
  drawn["prefix_acceptance"] = _prefix_acceptance(drafted)
  return drawn


def _over_k(lines: Sequence[dict], title: str) -> Figure:
  """Plots speedup over k, one colour per batch."""
  figure, [axes] = canvas.figure(3.6, title, (), 1)
  batches = sorted({line["run"]["batch"] for line in lines})
  for i, batch in enumerate(batches):
    group = [line for line in lines if line["run"]["batch"] == batch]
    ks = [line["run"]["k"] for line in group]
    look = canvas.style(i) | {"linestyle": "-"}
    _errorbar(axes, ks, group, **look, label=f"batch {batch}, measured")
    predicted = [line["prediction"]["speedup"] for line in group]
    look |= {"linestyle": "--", "markerfacecolor": "none"}
    axes.plot(ks, predicted, **look, label=f"batch {batch}, predicted")
  canvas.level(axes, linestyle=":")
  axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
  axes.set_xlabel("k, drafted tokens a round")
  axes.set_ylabel("speedup over autoregressive")
  canvas.legend(axes)
  return figure


def _prefix_acceptance(lines: Sequence[dict]) -> Figure:
  """Plots the prefix acceptance of each setting's largest k."""
  figure, [axes] = canvas.figure(3.6, "", (), 1)
  for i, (name, group) in enumerate(sweeps.by_setting(lines).items()):
    line = max(group, key=lambda x: x["run"]["k"])
    curve = line["observed"]["prefix_acceptance"]
    axes.plot(range(1, len(curve) + 1), curve, **_setting_style(i, name))
  axes.set_ylim(0, 1)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
  axes.set_xlabel("i, position in the draft")
  axes.set_ylabel("rounds that accept draft tokens 1 to i")
  canvas.legend(axes)
  return figure


def _scatter(lines: Sequence[dict]) -> Figure:
  """Plots measured against predicted speedup, with a band of 10 %."""
  figure, [axes] = canvas.figure(4.2, "", (), 1)
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
    predicted = [line["prediction"]["speedup"] for line in group]
    look = _setting_style(i, name) | {"linestyle": "none"}
    _errorbar(axes, predicted, group, **look)
  axes.set_xscale("log")
  axes.set_yscale("log")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xlabel("predicted speedup, times")
  axes.set_ylabel("measured speedup, times")
  canvas.legend(axes)
  return figure


def _errorbar(axes: Axes, x, lines: Sequence[dict], **look) -> None:
  """Draws measured speedups."""
  speedups = [line["run"]["speed"]["speedup"] for line in lines]
  y, errors = zip(*((s["value"], s["error"] or 0) for s in speedups))
  axes.errorbar(x, y, errors, **look, **canvas.BARS)


def _setting_style(i: int, name: str) -> dict:
  label = canvas.label(name.replace("; ", "\n", 1))
  return canvas.style(i) | {"markersize": 4, "label": label}


def _heatmap(
  lines: Sequence[dict], places: Sequence, title: str, label: str
) -> Figure:
  """Plots measured and predicted speedup over k and each line's place."""
  columns = list(dict.fromkeys(places))  # in the sweep's order
  ks = sorted({line["run"]["k"] for line in lines})
  measured = np.full((len(ks), len(columns)), math.nan)
  predicted = measured.copy()
  for line, place in zip(lines, places):
    where = ks.index(line["run"]["k"]), columns.index(place)
    measured[where] = line["run"]["speed"]["speedup"]["value"]
    predicted[where] = line["prediction"]["speedup"]
  panels = {"measured": measured, "predicted": predicted}
  return heatmaps.speedups(panels, columns, ks, (label, "k"), title)
