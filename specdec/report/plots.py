"""Plots measured runs and passes, without a display.

Invariant: plots show measurements only: a null value is a gap, a null error has
no bar. Colour is never the only distinction, and nothing covers data.
"""

import os
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure

from specdec.report import canvas

ALL = "all"  # the group of everything, drawn last and emphasised

_QUANTITIES = (
  ("acceptance", "tokens_per_pass", "tokens per target pass"),
  ("speed", "speedup", "speedup over autoregressive decoding, times"),
)
_LENGTHS = (
  ("acceptance", "accepted_length", "accepted tokens a round"),
  _QUANTITIES[1],
)
_CHILDREN = {
  "none": "",
  "iid": "i.i.d.",
  "without_replacement": "without replacement",
  "deterministic": "likeliest children",
}


def by_group(
  runs: Sequence[dict],
  path: str | os.PathLike,
  title: str,
  caveats: Sequence[str] = (),
) -> None:
  """Plots tokens per target pass and speedup by group.

  Bars if all runs share one k, else lines over k. Each batch size counts as a
  group of its own.

  Args:
    runs: JSON documents of runs, at most one per group, k and batch.
    path: output file; its suffix selects the format.
    title: figure title.
    caveats: warnings, printed in red below.

  Raises:
    ValueError: there are no runs, or two share group, k and batch.
  """
  canvas.save(_by_group(runs, title, caveats), path)


def speed_over_k(
  curves: dict[str, Sequence[dict]],
  path: str | os.PathLike,
  title: str,
  caveats: Sequence[str] = (),
) -> None:
  """Plots tokens per target pass and speedup over k.

  Args:
    curves: label -> runs as in `by_group`, at most one per k.
    path, title, caveats: as in `by_group`.

  Raises:
    ValueError: there are no runs, or two of one label share k.
  """
  canvas.save(_over_k(curves, title, caveats), path)


def over_sizes(
  runs: Sequence[dict],
  path: str | os.PathLike,
  title: str,
  caveats: Sequence[str] = (),
) -> None:
  """Plots accepted length and speedup over draft tokens per round.

  Args:
    runs: of scripts/compare_rules.py, at most one per size, shape and rule.
    path, title, caveats: as in `by_group`.

  Raises:
    ValueError: there are no runs, or two share size, shape and rule.
  """
  canvas.save(_over_sizes(runs, title, caveats), path)


def passes(
  entries: Sequence[dict],
  path: str | os.PathLike,
  title: str,
) -> None:
  """Plots T(n), the time of a pass of n tokens, and its roofline.

  Args:
    entries: passes of a JSON document of scripts/bench.py, of one context.
    path, title: as in `by_group`.

  Raises:
    ValueError: there are no entries, or two share batch and n.
  """
  canvas.save(_passes(entries, title), path)


def _by_group(runs, title, caveats) -> Figure:
  batches = {run["batch"] for run in runs}
  curves: dict[str, list[dict]] = {}
  for run in runs:
    label = run["group"]
    if len(batches) > 1:
      label += f", batch {run['batch']}"
    curves.setdefault(label, []).append(run)
  curves = dict(sorted(curves.items(), key=lambda curve: curve[0] == ALL))
  if len({run["k"] for run in runs}) > 1:
    return _over_k(curves, title, caveats)
  return _bars(curves, title, caveats)


def _bars(curves, title, caveats) -> Figure:
  curves = _ascending(curves, "k")
  labels = [_wrap(label) for label in curves]
  places = np.arange(len(labels))
  figure, panels = canvas.figure(_height(curves), title, caveats, 2)
  for axes, quantity in zip(panels, _QUANTITIES):
    values, errors = _columns([run for [run] in curves.values()], quantity)
    axes.barh(
      places,
      values,
      height=0.7,
      xerr=errors,
      color=["black" if label == ALL else canvas.COLORS[0] for label in curves],
      error_kw=canvas.BARS | {"ecolor": canvas.GRAY, "elinewidth": 1.5},
    )
    ends = values + np.nan_to_num(errors)
    for place, value, end in zip(places, values, ends):
      if np.isfinite(value):
        axes.annotate(
          f"{value:.2f}",
          (end, place),
          xytext=(4, 0),
          textcoords="offset points",
          va="center",
          fontsize=9,
          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    axes.axvline(1, color=canvas.GRAY, linewidth=1, linestyle="--", zorder=1.5)
    axes.set_xlim(0, 1.2 * np.max(np.nan_to_num(ends), initial=1))
    axes.set_ylim(len(labels) - 0.5, -0.5)  # downwards
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlabel(quantity[-1])
    axes.set_yticks(places, labels if axes is panels[0] else [])
    axes.tick_params(axis="y", length=0)
  for label, text in zip(curves, panels[0].get_yticklabels()):
    text.set_fontweight("bold" if label == ALL else "normal")
  return figure


def _over_k(curves, title, caveats) -> Figure:
  curves = _ascending(curves, "k")
  height = max(3.8, _height(curves))
  figure, panels = canvas.figure(height, title, caveats, 2)
  panels[1].sharex(panels[0])
  for axes, quantity in zip(panels, _QUANTITIES):
    axes.axhline(1, color=canvas.GRAY, linewidth=1, linestyle="--", zorder=0.5)
    for i, (label, runs) in enumerate(curves.items()):
      values, errors = _columns(runs, quantity)
      ks = [run["k"] for run in runs]
      style = _style(i, label)
      axes.errorbar(
        ks, values, errors, label=_wrap(label), **style, **canvas.BARS
      )
    axes.xaxis.set_major_locator(
      ticker.MaxNLocator(10, integer=True, min_n_ticks=1)
    )
    axes.set_xlabel("k, drafted tokens a round")
    axes.set_ylabel(quantity[-1])
  canvas.legend(panels[-1])
  return figure


def _over_sizes(runs, title, caveats) -> Figure:
  """Draws a row of panels for lossless rules and one for lossy ones.

  Colour encodes the shape, marker the rule, dashes the kind of siblings.
  """
  if not runs:
    raise ValueError("there are no runs to plot")
  points = [(run, run["comparison"]) for run in runs]

  def order(name):
    return list(dict.fromkeys(labels[name] for _, labels in points))

  shapes, rules, kinds = order("shape"), order("rule"), order("siblings")
  rows = [row for row in (True, False) if row in order("lossless")]
  figure, panels = canvas.figure(4.6 * len(rows), title, caveats, 2, len(rows))
  for lossless, pair in zip(rows, zip(panels[::2], panels[1::2])):
    curves: dict[tuple, list[dict]] = {}
    for run, labels in points:
      if labels["lossless"] == lossless:
        names = labels["shape"], labels["rule"], labels["siblings"]
        curves.setdefault(names, []).append(run)
    for axes, quantity in zip(pair, _LENGTHS):
      for names, line in _ascending(curves, "nodes").items():
        shape, rule, siblings = names
        values, errors = _columns(line, quantity)
        axes.errorbar(
          [run["nodes"] - 1 for run in line],
          values,
          errors,
          label=canvas.label(f"{shape}, {rule}\n{_CHILDREN[siblings]}".strip()),
          color=canvas.COLORS[shapes.index(shape) % len(canvas.COLORS)],
          marker=canvas.MARKERS[rules.index(rule) % len(canvas.MARKERS)],
          linestyle=canvas.LINES[kinds.index(siblings) % len(canvas.LINES)],
          markersize=5,
          **canvas.BARS,
        )
      axes.set_xscale("log", base=2)
      axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
      axes.set_xlabel("draft tokens of a round")
      axes.set_ylabel(quantity[-1])
    pair[0].set_ylim(bottom=0)
    pair[1].axhline(
      1, color=canvas.GRAY, linewidth=1, linestyle="--", zorder=0.5
    )
    pair[0].set_title("lossless" if lossless else "lossy", loc="left")
    canvas.legend(pair[1])
  return figure


def _passes(entries, title) -> Figure:
  curves: dict[str, list[dict]] = {}
  for entry in entries:
    curves.setdefault(f"batch {entry['batch']}", []).append(entry)
  curves = _ascending(curves, "tokens")
  figure, [axes] = canvas.figure(3.8, title, (), 1)
  for i, (label, line) in enumerate(curves.items()):
    tokens = [entry["tokens"] for entry in line]
    median = np.array([1e3 * entry["seconds"]["median"] for entry in line])
    low, high = 1e3 * np.array([e["seconds"]["quartiles"] for e in line]).T
    style = _style(i, label) | {"linestyle": "-"}  # roofs are dashed
    bars = (median - low, high - median)
    axes.errorbar(tokens, median, bars, label=label, **style, **canvas.BARS)
    roof = [1e3 * entry["roof_seconds"] for entry in line]
    axes.plot(tokens, roof, **style | {"linestyle": "--", "markersize": 3})
  roof = "roof: bytes over\nbandwidth or\nFLOPs over their\nrate, the longer"
  # As an errorbar, because a legend lists those after plain lines.
  axes.errorbar([], [], linestyle="--", color=canvas.GRAY, label=roof)
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xlabel("n, tokens of each row in a pass")
  axes.set_ylabel("time of a pass, milliseconds")
  canvas.legend(axes)
  return figure


def _height(labels: Iterable[str]) -> float:
  """Returns the height in inches that fits all labels, stacked."""
  return 1.1 + sum(0.29 + 0.17 * _wrap(label).count("\n") for label in labels)


def _style(i: int, label: str) -> dict:
  if label == ALL:  # drawn below the thinner lines
    return {"color": "black", "marker": "o", "linewidth": 4, "zorder": 1.9}
  return {
    "color": canvas.COLORS[i % len(canvas.COLORS)],
    "linestyle": canvas.LINES[i // len(canvas.COLORS) % len(canvas.LINES)],
    "marker": canvas.MARKERS[i % len(canvas.MARKERS)],
    "markersize": 5,
  }


def _wrap(label: str) -> str:
  return canvas.label(label, 22)


def _ascending(curves: dict[str, Sequence[dict]], name: str) -> dict:
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
