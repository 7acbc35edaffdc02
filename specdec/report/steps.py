"""Formats compiled steps."""

from collections.abc import Mapping, Sequence

from specdec.compiled import steps
from specdec.utils.terminal import columns

_HEADER = (
  "step", "compiled, s", "arguments", "temporaries", "of memory", "GFLOP",
  "read", "written", "by the cost model", "collectives",
)  # fmt: skip


def table(
  reports: Sequence[dict],
  estimates: Mapping[str, Mapping[str, float]],
  memory: float,
) -> str:
  """Lists what each step of steps.compile_step needs and does, per chip, and
  the estimates; or its error. In lines, for a terminal."""
  return columns(_HEADER, _lines(reports, estimates, memory))


def markdown(
  reports: Sequence[dict],
  estimates: Mapping[str, Mapping[str, float]],
  memory: float,
) -> str:
  """Returns the same with a step a column, which a page has the width for."""
  names, *lines = zip(_HEADER, *_lines(reports, estimates, memory))
  lines = [names, ["---"] * len(names), *lines]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(reports, estimates, memory) -> list[list[str]]:
  empty = [""] * (len(_HEADER) - 2)
  return [
    [report["step"], report["error"], *empty]
    if "error" in report
    else _line(report, estimates.get(report["step"]), memory)
    for report in reports
  ]


def gathered(report: dict) -> str:
  """Says which weights that are shared out a step puts together on a chip."""
  if "gathered" not in report:
    return "which weights a chip gathers is unknown"
  if not report["gathered"]:
    return "no weight of the target is gathered whole on a chip"
  return "\n".join(
    f"gathered whole on a chip: {one['shape']}, {one['times']:g} times, "
    f"{one['bytes'] / 1e6:.1f} MB, by {one['source']}"
    for one in report["gathered"]
  )


def _line(report: dict, estimate, memory: float) -> list[str]:
  needed, model = steps.held(report), ""
  if estimate:
    share = (report["read"] + report["written"]) / estimate["bytes"]
    model = f"{estimate['bytes'] / 1e6:.1f} MB ({share:.2f}), "
    model += f"{estimate['flops'] / 1e9:.1f} GFLOP"
  return [
    report["step"],
    f"{report['seconds']:.1f}",
    f"{report['arguments'] / 2**30:.3f} GiB",
    f"{report['temporaries'] / 2**20:.1f} MiB",
    f"{needed / memory:.0%}" + ("" if needed <= memory else ": too much"),
    f"{report['flops'] / 1e9:.1f}",
    f"{report['read'] / 1e6:.1f} MB",
    f"{report['written'] / 1e6:.1f} MB",
    model,
    ", ".join(
      f"{count:g} {kind} {_sized(size)}"
      for kind, (count, size) in report["collectives"].items()
    ),
  ]


def _sized(size: float) -> str:
  return f"{size / 1e6:.4g} MB" if size >= 1e6 else f"{size / 1e3:.4g} KB"
