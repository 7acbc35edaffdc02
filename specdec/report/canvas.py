"""Style of every figure: width, colours, titles, legends.

Invariant: figures are readable at a README's width, colour is never the only
distinction, no legend covers data, and names from users or files pass `label`.
"""

import os
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.utils import files
from specdec.utils.terminal import escape

# Okabe and Ito's colour-blind-safe palette, without yellow (pale on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", ":", "-.")
MARKERS = "os^DvP<X>*hpd"
BARS = {"capsize": 2, "elinewidth": 1}
RED = "#B22222"
GRAY = "#767676"
WIDTH = 8.3  # inches; at 100 pixels each in a README 10 points are 14 pixels


def figure(
  height, title, caveats, columns, rows=1
) -> tuple[Figure, list[Axes]]:
  """Returns a figure of so many inches, title and caveats aside, and its empty
  panels."""
  title = label(title, 80, 1000) if title else ""
  caveats = [label(f"warning: {caveat}", 105, 1000) for caveat in caveats]
  height += 0.2 * sum(1 + text.count("\n") for text in (title, *caveats))
  drawing = Figure(figsize=(WIDTH, height), dpi=150, layout="constrained")
  drawing.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04)
  drawing.suptitle(title, fontsize=11.5)
  if caveats:
    drawing.supxlabel("\n".join(caveats), fontsize=9, color=RED)
  panels = list(drawing.subplots(rows, columns, squeeze=False).ravel())
  for axes in panels:
    axes.spines[["top", "right"]].set_visible(False)
  return drawing, panels


def label(text: str, width: int = 40, longest: int = 200) -> str:
  """Escapes text so that matplotlib prints it literally.

  Disables math and control characters, wraps lines and truncates. Legends drop
  labels that are empty or begin with _, so these are padded.
  """
  text = escape(text)
  if len(text) > longest:
    text = text[: longest - 1] + "…"
  lines = [textwrap.fill(line, width) for line in text.split("\n")]
  text = "\n".join(lines).replace("$", r"\$")
  return (f" {text}" if text.startswith("_") else text) or "(no name)"


def style(
  color: int, marker: int | None = None, dashes: int | None = None
) -> dict:
  """Returns the look of a curve, which marker and dashes tell apart as well."""
  marker = color if marker is None else marker
  dashes = color // len(COLORS) if dashes is None else dashes
  return {
    "color": COLORS[color % len(COLORS)],
    "marker": MARKERS[marker % len(MARKERS)],
    "linestyle": LINES[dashes % len(LINES)],
    "markersize": 5,
  }


def level(axes: Axes, **changes) -> None:
  """Draws a dashed line at 1, where speculation gains nothing."""
  look = {"color": GRAY, "linewidth": 1, "linestyle": "--", "zorder": 0.5}
  axes.axhline(1, **look | changes)


def log2(axes: Axes) -> None:
  """Scales x in powers of two, written as numbers."""
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter("{x:g}")


def save(drawing: Figure, path: str | os.PathLike) -> None:
  """Writes a figure; the file's suffix selects the format."""
  form = os.path.splitext(path)[1][1:] or None
  files.replace_file(path, lambda file: drawing.savefig(file, format=form))


def legend(axes: Axes) -> None:
  """Places the legend to the right of the panel."""
  axes.legend(
    loc="upper left",
    bbox_to_anchor=(1.02, 1),  # outside
    borderaxespad=0,
    frameon=False,
    fontsize=9,
    handlelength=3,
  )
