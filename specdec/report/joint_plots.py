"""Plots joint training: held-out loss of the target and tokens per pass.

Invariant: every seed is a point next to its kind's mean and standard error, so
that the number of runs is visible.
"""

import os
from collections.abc import Sequence

from specdec.benchmark.metrics import Estimate
from specdec.report import canvas

Column = tuple[str, Estimate, Sequence[float]]  # name, mean, value per seed


def losses(
  differences: Sequence[Column],
  passes: Sequence[Column],
  path: str | os.PathLike,
  title: str,
) -> None:
  """Plots differences of held-out loss, and tokens per pass.

  Args:
    differences: held-out loss minus the baseline's, nats per token.
    passes: tokens per target pass.
    path: output file; its suffix selects the format.
    title: figure title.
  """
  figure, panels = canvas.figure(3.2, title, (), 2)
  for axes, columns, label, level in (
    (panels[0], differences, "held-out loss minus none's, nats/token", 0.0),
    (panels[1], passes, "tokens per target pass", 1.0),
  ):
    axes.axhline(level, color=canvas.GRAY, linewidth=1)
    for i, (_, mean, values) in enumerate(columns):
      color = canvas.COLORS[i % len(canvas.COLORS)]
      axes.errorbar(
        i, mean.value, mean.error, fmt="_", color=color, ms=18, **canvas.BARS
      )
      x = [i + 0.18] * len(values)
      axes.plot(x, values, "o", color=color, fillstyle="none", ms=4)
    names = [canvas.label(name, 16) for name, *_ in columns]
    axes.set_xticks(range(len(columns)), names)
    axes.set_xlim(-0.5, max(len(columns), 1) - 0.5)
    axes.set_ylabel(label)
  canvas.save(figure, path)
