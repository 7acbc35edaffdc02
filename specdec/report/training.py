"""Tables and plots of training runs: a line for each drafter, or joint kind."""

import os
from collections.abc import Sequence

from matplotlib import ticker

from specdec.report import canvas
from specdec.report.tables import listed
from specdec.report.training_runs import Curve, Kind
from specdec.utils import terminal


def curve_table(curves: Sequence[Curve]) -> str:
  """Formats learning curves after their last evaluation."""

  def last_doubling(curve: Curve) -> str:
    gain = curve.last_doubling
    return "-" if gain is None else f"{gain:+.2f}"

  columns = {
    "run": "{.name}",
    "tokens": lambda curve: f"{curve.tokens[-1]:,}",
    "k": "{.k}",
    "kept": lambda curve: f"{curve.acceptance[-1]:.3f}",
    "first": lambda curve: f"{curve.first[-1]:.2f}",
    "tokens/pass": lambda curve: f"{curve.tokens_per_pass[-1]:.2f}",
    "last doubling": last_doubling,
  }
  return listed(curves, columns)


def plot_curves(
  curves: Sequence[Curve], path: str | os.PathLike, title: str
) -> None:
  """Plots acceptance and tokens per target step, over the log of tokens."""
  figure, panels = canvas.figure(4.0, title, (), 2)
  for axes, quantity, label in (
    (panels[0], "acceptance", "acceptance probability (text)"),
    (panels[1], "tokens_per_pass", "tokens per target step (decoding)"),
  ):
    for i, curve in enumerate(curves):
      axes.plot(
        curve.tokens,
        getattr(curve, quantity),
        label=canvas.label(curve.name),
        **canvas.style(i),
      )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel(label)
  if len(curves) > 1:
    canvas.legend(panels[1])
  canvas.save(figure, path)


def joint_table(kinds: Sequence[Kind]) -> str:
  """Formats a comparison of joint training."""
  columns = {
    "kind": "{.kind}",
    "seeds": lambda kind: " ".join(str(run.seed) for run in kind.runs),
    "loss": "{.loss:.4f}",
    "less none's": "{.difference:.4f}",
    "tokens/pass": "{.tokens_per_pass}",
  }
  return listed(kinds, columns)


def plot_joint(kinds: Sequence[Kind], path: str | os.PathLike) -> None:
  """Plots differences of held-out loss, and tokens per target step.

  Every seed is a point next to its kind's mean and standard error, so that the
  number of runs is visible.
  """
  title = (
    f"Joint training, {kinds[0].runs[0].tokens / 1e6:.2f} M tokens each: "
    "points are seeds, bars standard errors"
  )
  losses = [
    (kind.kind, kind.difference, list(kind.differences.values()))
    for kind in kinds
    if kind.differences
  ]
  passes = [
    (kind.kind, kind.tokens_per_pass, [x.tokens_per_pass for x in kind.runs])
    for kind in kinds
    if kind.tokens_per_pass.value is not None
  ]
  figure, panels = canvas.figure(3.2, title, (), 2)
  for axes, columns, label, level in (
    (panels[0], losses, "held-out loss minus none's, nats/token", 0.0),
    (panels[1], passes, "tokens per target step", 1.0),
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


def speed_table(
  seconds: float,
  tokens_per_second: float,
  flops: float,
  gemm_flops: float,
  load: Sequence[float],
) -> str:
  """Formats the speed of a training step: FLOP/s of it and of a product, and
  averages of the number of runnable processes."""
  return terminal.table(
    [
      ("one step", f"{seconds * 1e3:.0f} ms"),
      ("tokens", f"{tokens_per_second:,.0f} a second"),
      ("arithmetic", f"{flops / 1e9:.1f} GFLOP/s"),
      ("a float32 product", f"{gemm_flops / 1e9:.1f} GFLOP/s"),
      ("share of it", f"{flops / gemm_flops:.0%}"),
      ("load", " ".join(f"{average:.2f}" for average in load)),
    ]
  )
