"""A figure of what second losses do to a target, and of what they buy.

Invariant: every seed is drawn as a point beside its kind's mean and standard
error, so that nobody takes three runs for thirty.
"""

import os
from collections.abc import Sequence

from specdec.benchmark.metrics import Estimate
from specdec.report import canvas

Column = tuple[str, Estimate, Sequence[float]]  # name, mean, each seed's value


def losses(
  differences: Sequence[Column],
  passes: Sequence[Column],
  path: str | os.PathLike,
  title: str,
) -> None:
  """Writes the figure.

  Args:
    differences: held-out loss less the baseline's, nats a token.
    passes: tokens per target pass.
    path: of a file; its suffix decides on the format.
    title: what stands above.
  """
  made, panels = canvas.figure(3.2, title, (), 2)
  for axes, columns, label, level in (
    (panels[0], differences, "held-out loss less none's, nats a token", 0.0),
    (panels[1], passes, "tokens per target pass", 1.0),
  ):
    axes.axhline(level, color=canvas.GRAY, linewidth=1)
    for i, (_, mean, values) in enumerate(columns):
      color = canvas.COLORS[i % len(canvas.COLORS)]
      axes.errorbar(
        i, mean.value, mean.error, fmt="_", color=color, ms=18, **canvas.BARS
      )
      overhead = [i + 0.18] * len(values)
      axes.plot(overhead, values, "o", color=color, fillstyle="none", ms=4)
    names = [canvas.label(name, 16) for name, *_ in columns]
    axes.set_xticks(range(len(columns)), names)
    axes.set_xlim(-0.5, max(len(columns), 1) - 0.5)
    axes.set_ylabel(label)
  canvas.save(made, path)
