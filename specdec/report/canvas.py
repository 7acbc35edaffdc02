"""The canvas of every picture here: width, colours, titles, legends.

Invariant: readable at a README's width, nothing told by colour alone, no legend
over data, and names that a user or a file gave pass `label`.
"""

import os
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.utils import files
from specdec.utils.terminal import escape

# After Okabe and Ito, for the colour-blind; without yellow, too pale on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINES = ("-", "--", ":", "-.")
MARKERS = "os^DvP<X>*hpd"
BARS = {"capsize": 2, "elinewidth": 1}
RED = "#B22222"
GRAY = "#767676"
WIDTH = 8.3  # inches, 100 pixels of a README each: 10 points are 14 pixels


def figure(
  height, title, caveats, columns, rows=1
) -> tuple[Figure, list[Axes]]:
  """A figure and its empty panels; room for title and caveats comes on top."""
  title = label(title, 80, 1000) if title else ""
  caveats = [label(f"warning: {caveat}", 105, 1000) for caveat in caveats]
  height += 0.2 * sum(1 + text.count("\n") for text in (title, *caveats))
  made = Figure(figsize=(WIDTH, height), dpi=150, layout="constrained")
  made.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.04)
  made.suptitle(title, fontsize=11.5)
  if caveats:
    made.supxlabel("\n".join(caveats), fontsize=9, color=RED)
  panels = list(made.subplots(rows, columns, squeeze=False).ravel())
  for axes in panels:
    axes.spines[["top", "right"]].set_visible(False)
  return made, panels


def label(text: str, width: int = 40, longest: int = 200) -> str:
  """Any text as matplotlib shows it letter by letter.

  Neither formulas nor control characters are obeyed, lines are wrapped, and
  what is too long is cut. A legend leaves out what is empty or begins with _.
  """
  text = escape(text)
  if len(text) > longest:
    text = text[: longest - 1] + "…"
  lines = [textwrap.fill(line, width) for line in text.split("\n")]
  text = "\n".join(lines).replace("$", r"\$")
  return (f" {text}" if text.startswith("_") else text) or "(no name)"


def save(made: Figure, path: str | os.PathLike) -> None:
  """Writes a picture; the file's suffix decides on the format."""
  form = os.path.splitext(path)[1][1:] or None
  files.replace_file(path, lambda file: made.savefig(file, format=form))


def legend(axes: Axes) -> None:
  """Puts the legend beside the panel."""
  axes.legend(
    loc="upper left",
    bbox_to_anchor=(1.02, 1),  # outside
    borderaxespad=0,
    frameon=False,
    fontsize=9,
    handlelength=3,
  )
