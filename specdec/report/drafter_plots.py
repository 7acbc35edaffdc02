"""Plots drafters side by side, over draft tokens per round."""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib import ticker

from specdec.report import canvas


def over_k(
  runs: Sequence[dict], path: str | Path, title: str, caveats: Sequence[str]
) -> None:
  """Plots tokens per target pass and speedup; one row per temperature.

  Args:
    runs: documents of scripts/compare_drafters.py.
    path: output file; its suffix selects the format.
    title: figure title.
    caveats: warnings, printed in red below.
  """
  temperatures = list(dict.fromkeys(r["drafter"]["temperature"] for r in runs))
  names = list(dict.fromkeys(r["drafter"]["name"] for r in runs))
  figure, panels = canvas.figure(
    4.6 * len(temperatures), title, caveats, 2, len(temperatures)
  )
  for row, temperature in enumerate(temperatures):
    tokens, speed = panels[2 * row : 2 * row + 2]
    for i, name in enumerate(names):
      style = {
        "color": canvas.COLORS[i % len(canvas.COLORS)],
        "marker": canvas.MARKERS[i % len(canvas.MARKERS)],
        "linestyle": canvas.LINES[i // len(canvas.COLORS) % len(canvas.LINES)],
        "markersize": 5,
        "label": canvas.label(_label(name)),
      }
      for shape in ("chain", "tree"):
        wanted = {"name": name, "temperature": temperature, "shape": shape}
        points = [r for r in runs if wanted.items() <= r["drafter"].items()]
        if shape == "tree":  # a single hollow marker
          style |= {"linestyle": "", "markerfacecolor": "none", "label": None}
        for axes, part, quantity in (
          (tokens, "acceptance", "tokens_per_pass"),
          (speed, "speed", "speedup"),
        ):
          y = [r[part][quantity]["value"] for r in points]
          if points:
            # Of a chain with another drafter ahead of it, its own length.
            x = [r["k"] if shape == "chain" else r["nodes"] - 1 for r in points]
            axes.plot(x, y, **style)
    distribution = (
      "greedy" if temperature == 0 else f"temperature {temperature:g}"
    )
    for axes, ylabel in (
      (tokens, "tokens per target pass"),
      (speed, "speedup over autoregressive decoding"),
    ):
      axes.set_xscale("log", base=2)
      axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
      axes.set_xlabel("draft tokens per round (hollow: a tree)")
      axes.set_ylabel(ylabel)
      axes.set_title(distribution, loc="left", fontsize=10)
    speed.axhline(1, color=canvas.GRAY, linewidth=1, linestyle="--")
    canvas.legend(speed)
  canvas.save(figure, path)


def _label(name: str) -> str:
  """Shortens a drafter's call: files to their stems, or their folders."""

  def short(match: re.Match) -> str:
    path = Path(match[0])
    return path.parent.name if path.stem in ("best", "last") else path.stem

  return re.sub(r"[^\s(=,'\"]+\.safetensors\b", short, name)
