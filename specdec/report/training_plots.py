"""Plots acceptance over tokens trained on, run by run."""

import os
from collections.abc import Sequence

from matplotlib import ticker

from specdec.report import canvas

# name, tokens trained on, acceptance probability, tokens per target pass
Curve = tuple[str, Sequence[int], Sequence[float], Sequence[float]]


def curves(runs: Sequence[Curve], path: str | os.PathLike, title: str) -> None:
  """Plots acceptance and tokens per pass; tokens trained on in log scale."""
  figure, panels = canvas.figure(4.0, title, (), 2)
  for axes, place, label in (
    (panels[0], 2, "acceptance probability (text)"),
    (panels[1], 3, "tokens per target pass (decoding)"),
  ):
    for i, run in enumerate(runs):
      axes.plot(
        run[1],
        run[place],
        color=canvas.COLORS[i % len(canvas.COLORS)],
        marker=canvas.MARKERS[i % len(canvas.MARKERS)],
        linestyle=canvas.LINES[i // len(canvas.COLORS) % len(canvas.LINES)],
        markersize=5,
        label=canvas.label(run[0]),
      )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel(label)
  if len(runs) > 1:
    canvas.legend(panels[1])
  canvas.save(figure, path)
