"""Plots measured runs and passes, without a display.

Invariant: plots show measurements only: a null value is a gap, a null error has
no bar. Colour is never the only distinction, and nothing covers data.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.report import canvas, tables

ALL = tables.ALL  # the group of everything, drawn last and emphasised
_WIDTH = 22  # characters of a label's line

_TOKENS = "acceptance", "tokens_per_pass", "tokens per target step"
_LENGTH = "acceptance", "accepted_length", "accepted tokens a round"
_SPEEDUP = "speed", "speedup", "speedup over autoregressive decoding"
_TIMES = *_SPEEDUP[:2], f"{_SPEEDUP[2]}, times"
_CHILDREN = tables.CHILDREN | {"none": ""}
Curve = tuple[dict, Sequence[float], Sequence[dict]]  # look, x, runs


def by_group(
  runs: Sequence[dict], title: str, caveats: Sequence[str] = ()
) -> Figure:
  """Plots tokens per target step and speedup by group.

  Bars if all runs share one k, else lines over k. Each batch size counts as a
  group of its own; of one group, k and batch there is one run at most.
  """
  batches = {run["batch"] for run in runs}
  curves: dict[str, list[dict]] = {}
  for run in runs:
    batch = f", batch {run['batch']}" if len(batches) > 1 else ""
    curves.setdefault(run["group"] + batch, []).append(run)
  curves = dict(sorted(curves.items(), key=lambda curve: curve[0] == ALL))
  if len({run["k"] for run in runs}) > 1:
    return over_k(curves, title, caveats)
  return _bars(curves, title, caveats)


def _bars(curves, title, caveats, tokens=_TOKENS, width=_WIDTH) -> Figure:
  curves = _ascending(curves, "k")
  labels = [canvas.label(label, width) for label in curves]
  places = np.arange(len(labels))
  figure, panels = canvas.figure(_height(labels), title, caveats, 2)
  for axes, quantity in zip(panels, (tokens, _TIMES)):
    values, errors = _columns([run for [run] in curves.values()], quantity)
    bars = axes.barh(
      places,
      values,
      height=0.7,
      xerr=errors,
      color=["black" if label == ALL else canvas.COLORS[0] for label in curves],
      error_kw=canvas.BARS | {"ecolor": canvas.GRAY, "elinewidth": 1.5},
    )
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9, bbox=ground)
    ends = values + np.nan_to_num(errors)
    if quantity is not _LENGTH:  # the baseline's
      look = {"linewidth": 1, "linestyle": "--", "zorder": 1.5}
      axes.axvline(1, color=canvas.GRAY, **look)
    axes.set_xlim(0, 1.2 * np.max(np.nan_to_num(ends), initial=1))
    axes.set_ylim(len(labels) - 0.5, -0.5)  # downwards
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(canvas.label(quantity[-1], 30))
    axes.set_yticks(places, labels if axes is panels[0] else [])
    axes.tick_params(axis="y", length=0)
  for label, text in zip(curves, panels[0].get_yticklabels()):
    text.set_fontweight("bold" if label == ALL else "normal")
  return figure


def over_k(
  curves: dict[str, Sequence[dict]], title: str, caveats: Sequence[str] = ()
) -> Figure:
  """Plots tokens per target step and speedup over k, of at most one run of a
  label at each k."""
  curves = _ascending(curves, "k")
  height = max(3.8, _height(canvas.label(x, _WIDTH) for x in curves))
  figure, panels = canvas.figure(height, title, caveats, 2)
  panels[1].sharex(panels[0])
  for axes in panels:
    canvas.level(axes)
  lines = [
    (_style(i, label), [run["k"] for run in runs], runs)
    for i, (label, runs) in enumerate(curves.items())
  ]
  _draw(panels, (_TOKENS, _TIMES), lines, "k, drafted tokens a round")
  for axes in panels:
    axes.xaxis.set_major_locator(
      ticker.MaxNLocator(10, integer=True, min_n_ticks=1)
    )
  return figure


def over_sizes(
  runs: Sequence[dict], title: str, caveats: Sequence[str] = ()
) -> Figure:
  """Plots accepted length and speedup over draft tokens per round, of runs of
  scripts/compare_rules.py.

  A row of panels for lossless rules and one for lossy ones. Colour encodes the
  shape, marker the rule, dashes the kind of siblings. One size alone is bars.
  """
  if len({run["nodes"] for run in runs}) == 1:
    return _of_one_size(runs, title, caveats)
  shapes, rules, kinds, lossless = (
    list(dict.fromkeys(run["comparison"][name] for run in runs))
    for name in ("shape", "rule", "siblings", "lossless")
  )
  rows = sorted(lossless, reverse=True)
  figure, panels = canvas.figure(4.6 * len(rows), title, caveats, 2, len(rows))
  for wanted, pair in zip(rows, zip(panels[::2], panels[1::2])):
    curves: dict[tuple, list[dict]] = {}
    for run in runs:
      labels = run["comparison"]
      if labels["lossless"] == wanted:
        names = labels["shape"], labels["rule"], labels["siblings"]
        curves.setdefault(names, []).append(run)
    lines = []
    for names, line in _ascending(curves, "nodes").items():
      shape, rule, siblings = names
      look = canvas.style(
        shapes.index(shape), rules.index(rule), kinds.index(siblings)
      )
      label = f"{shape}, {rule}\n{_CHILDREN[siblings]}".strip()
      look["label"] = canvas.label(label)
      lines.append((look, [run["nodes"] - 1 for run in line], line))
    _draw(pair, (_LENGTH, _TIMES), lines, "draft tokens of a round")
    for axes in pair:
      canvas.log2(axes)
    pair[0].set_ylim(bottom=0)
    canvas.level(pair[1])
    pair[0].set_title("lossless" if wanted else "lossy", loc="left")
  return figure


def _of_one_size(runs, title, caveats) -> Figure:
  """A bar for each rule and shape, lossless rules first."""
  curves: dict[str, list[dict]] = {}
  for run in sorted(runs, key=lambda run: not run["comparison"]["lossless"]):
    labels = run["comparison"]
    name = f"{labels['shape']}, {labels['rule']}"
    notes = _CHILDREN[labels["siblings"]], "" if labels["lossless"] else "lossy"
    notes = ", ".join(filter(None, notes))
    name += f" ({notes})" if notes else ""
    curves.setdefault(name, []).append(run)
  return _bars(curves, title, caveats, _LENGTH, 60)


def over_drafters(
  runs: Sequence[dict], title: str, caveats: Sequence[str] = ()
) -> Figure:
  """Plots runs of scripts/compare_drafters.py; one row per temperature."""
  temperatures = list(dict.fromkeys(r["drafter"]["temperature"] for r in runs))
  names = list(dict.fromkeys(r["drafter"]["name"] for r in runs))
  figure, panels = canvas.figure(
    4.6 * len(temperatures), title, caveats, 2, len(temperatures)
  )
  hollow = {"linestyle": "", "markerfacecolor": "none", "label": None}
  for row, temperature in enumerate(temperatures):
    pair = panels[2 * row : 2 * row + 2]
    lines = []
    for i, name in enumerate(names):
      look = canvas.style(i) | {"label": canvas.label(_short(name))}
      for shape, changes in (("chain", {}), ("tree", hollow)):
        wanted = {"name": name, "temperature": temperature, "shape": shape}
        line = [run for run in runs if wanted.items() <= run["drafter"].items()]
        # Of a chain with another drafter ahead of it, its own length.
        x = [run["k"] if shape == "chain" else run["nodes"] - 1 for run in line]
        if line:
          lines.append((look | changes, x, line))
    label = "draft tokens per round (hollow: a tree)"
    _draw(pair, (_TOKENS, _SPEEDUP), lines, label, bars=False)
    for axes in pair:
      canvas.log2(axes)
      name = f"temperature {temperature:g}" if temperature else "greedy"
      axes.set_title(name, loc="left", fontsize=10)
    canvas.level(pair[1])
  return figure


def _short(name: str) -> str:
  """Shortens a drafter's call: files to their stems, or their folders."""

  def short(match: re.Match) -> str:
    path = Path(match[0])
    return path.parent.name if path.stem in ("best", "last") else path.stem

  return re.sub(r"[^\s(=,'\"]+\.safetensors\b", short, name)


def passes(entries: Sequence[dict], title: str) -> Figure:
  """Plots T(n), the time of a pass of n tokens, and its roofline, of passes of
  scripts/bench.py after one context."""
  curves: dict[str, list[dict]] = {}
  for entry in entries:
    curves.setdefault(f"batch {entry['batch']}", []).append(entry)
  curves = _ascending(curves, "tokens")
  figure, [axes] = canvas.figure(3.8, title, (), 1)
  for i, (label, line) in enumerate(curves.items()):
    tokens = [entry["tokens"] for entry in line]
    median = np.array([1e3 * entry["seconds"]["median"] for entry in line])
    low, high = 1e3 * np.array([e["seconds"]["quartiles"] for e in line]).T
    look = canvas.style(i) | {"linestyle": "-"}  # roofs are dashed
    bars = (median - low, high - median)
    axes.errorbar(tokens, median, bars, label=label, **look, **canvas.BARS)
    roof = [1e3 * entry["roof_seconds"] for entry in line]
    axes.plot(tokens, roof, **look | {"linestyle": "--", "markersize": 3})
  roof = "roof: bytes over\nbandwidth or\nFLOPs over their\nrate, the longer"
  # As an errorbar, because a legend lists those after plain lines.
  axes.errorbar([], [], linestyle="--", color=canvas.GRAY, label=roof)
  canvas.log2(axes)
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter("{x:g}")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xlabel("n, tokens of each row in a pass")
  axes.set_ylabel("time of a pass, milliseconds")
  canvas.legend(axes)
  return figure


def _draw(
  panels: Sequence[Axes],
  quantities: Sequence[tuple[str, str, str]],
  curves: Iterable[Curve],
  xlabel: str,
  bars: bool = True,
) -> None:
  """Draws each quantity of all curves in a panel, by default with errors."""
  for axes, quantity in zip(panels, quantities):
    for look, x, runs in curves:
      values, errors = _columns(runs, quantity)
      axes.errorbar(x, values, errors if bars else None, **look, **canvas.BARS)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(quantity[-1])
  canvas.legend(panels[-1])


def _height(labels: Iterable[str]) -> float:
  """Returns the height in inches that fits all wrapped labels, stacked."""
  return 1.1 + sum(0.29 + 0.17 * label.count("\n") for label in labels)


def _style(i: int, label: str) -> dict:
  look = canvas.style(i)
  if label == ALL:  # drawn below the thinner lines
    look = {"color": "black", "marker": "o", "linewidth": 4, "zorder": 1.9}
  return look | {"label": canvas.label(label, _WIDTH)}


def _ascending(curves: dict, name: str) -> dict:
  """Sorts each curve's points by `name`, which must be unique."""
  if not curves or not all(curves.values()):
    raise ValueError(f"there is nothing to plot in {list(curves)}")
  for label, points in curves.items():
    values = [point[name] for point in points]
    if len(set(values)) < len(values):
      raise ValueError(f"{label!r} has several points at one {name}: {values}")
  return {
    label: sorted(points, key=lambda point: point[name])
    for label, points in curves.items()
  }


def _columns(runs, quantity) -> tuple[np.ndarray, np.ndarray]:
  """Returns values and errors of a quantity; null becomes nan."""
  part, name, _ = quantity
  estimates = [run[part][name] for run in runs]
  values = np.array([estimate["value"] for estimate in estimates], float)
  return values, np.array([estimate["error"] for estimate in estimates], float)
