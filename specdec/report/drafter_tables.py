"""Tables of drafters side by side, and of subsets of layers."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence

from specdec.report.tables import estimate, listed, markdown, speedup_of

_SHOWN = 5  # of the best subsets


def of_drafters(runs: Sequence[dict], listed: Callable = listed) -> str:
  """Formats runs of compare_drafters.py, two tables for each temperature."""
  chains = [run for run in runs if run["drafter"]["shape"] == "chain"]
  shapes = [f"k={k}" for k in sorted({run["k"] for run in chains})] + ["tree"]

  def by_shape(entry: Callable[[dict], str]) -> dict[str, Callable]:
    return {
      shape: lambda row, shape=shape: entry(row[shape]) if shape in row else ""
      for shape in shapes
    }

  parts = []
  for temperature in sorted({r["drafter"]["temperature"] for r in runs}):
    rows: dict[str, dict[str, dict]] = {}  # a drafter's runs by shape
    for run in runs:
      drafter = run["drafter"]
      if drafter["temperature"] == temperature:
        shape = f"k={run['k']}" if drafter["shape"] == "chain" else "tree"
        rows.setdefault(drafter["name"], {})[shape] = run
    for row in rows.values():
      drawn = [run for shape, run in row.items() if shape != "tree"]
      row["longest"] = max(drawn, key=lambda run: run["k"])
      row["best"] = max(drawn, key=speedup_of)
    name = {"drafter": "{[longest][drafter][name]}"}
    title = f"temperature {temperature:g}" if temperature else "greedy"
    table = listed(rows.values(), name | _ABOUT | by_shape(_tokens))
    parts.append(f"{title}; tokens per target step\n\n{table}")
    table = listed(rows.values(), name | by_shape(_speed) | _BEST)
    parts.append(f"{title}; speedup, measured / by bytes\n\n{table}")
  return "\n\n".join(parts)


def _tokens(run: dict) -> str:
  return f"{run['acceptance']['tokens_per_pass']['value']:.2f}"


def _speed(run: dict) -> str:
  predicted = run["predicted"]
  predicted = "-" if predicted is None else f"{predicted:.2f}"
  return f"{estimate('speed', 'speedup')(run)} / {predicted}"


def _millions(row: dict, name: str, unit: str = "") -> str:
  number = row["longest"]["drafter"][name]
  return f"{number / 1e6:.2f}{unit}" if number else "-"


def _by_position(row: dict) -> str:
  shares = [x["value"] for x in row["longest"]["acceptance"]["conditional"]]
  return " ".join("-" if x is None else f"{x:.2f}" for x in shares[:4])


_ABOUT = {
  "weights": lambda row: _millions(row, "weights", " M"),
  "MB a further draft token": lambda row: _millions(row, "step_bytes"),
  "at position 1 2 3 4": _by_position,
}
_BEST = {  # the fastest chain, and tokens per second of both
  "best": lambda row: (
    f"k={row['best']['k']}: {estimate('best', 'speed', 'speedup')(row)}"
  ),
  "tokens/s": "{[best][speed][tokens_per_second]:.0f}",
  "baseline": "{[best][speed][baseline_tokens_per_second]:.0f}",
}


def batches(documents: Mapping, *names: str) -> str:
  """Formats documents of compare_drafters.py that differ in the batch: each
  drafter's fastest chain at each, losses included."""
  rows: dict[tuple[float, str], dict] = {}
  for name in names:
    chains = documents[name]["runs"]
    chains = (x for x in chains if x["drafter"]["shape"] == "chain")
    for run in chains:
      drafter = run["drafter"]
      row = rows.setdefault((drafter["temperature"], drafter["name"]), {})
      row.setdefault(run["batch"], []).append(run)
  batches = sorted({batch for row in rows.values() for batch in row})

  def cell(batch: int, row: tuple) -> str:
    if batch not in rows[row]:
      return ""
    best = max(rows[row][batch], key=speedup_of)
    return f"{_speed(best)}, k = {best['k']}"

  def longest(row: tuple) -> dict:
    runs = next(iter(rows[row].values()))
    return {"longest": max(runs, key=lambda run: run["k"])}

  columns = {
    "T": "{[0]:g}",
    "drafter": "{[1]}",
    "at position 1 2 3 4": lambda row: _by_position(longest(row)),
  }
  columns |= {f"batch {x}": functools.partial(cell, x) for x in batches}
  return markdown(rows, columns)


def of_subsets(trials: Sequence[dict]) -> str:
  """Formats the best trials of choose_layers.py, and that of no sublayer."""
  distinct = {json.dumps(trial): trial for trial in trials}
  ranked = sorted(distinct.values(), key=lambda x: -x["tokens_per_second"])
  rows = [{"place": n, **x} for n, x in enumerate(ranked[:_SHOWN], 1)]
  nothing = [x for x in ranked if not (x["skip_attention"] + x["skip_mlp"])]
  rows += [{"place": "-", **trial} for trial in nothing[:1]]
  columns = {
    "": "{[place]}",
    "attention skipped": lambda trial: _spans(trial["skip_attention"]),
    "MLP skipped": lambda trial: _spans(trial["skip_mlp"]),
    "k": "{[k]}",
    "drafted/round": "{[drafted_per_round]:.2f}",
    "tokens/pass": "{[tokens_per_round]:.2f}",
    "tokens/s": "{[tokens_per_second]:.1f}",
  }
  return listed(rows, columns)


def _spans(numbers: Sequence[int]) -> str:
  """Writes (1, 4, 5, 6) as '1,4-6'."""
  spans: list[list[int]] = []
  for number in sorted(set(numbers)):
    if spans and number == spans[-1][-1] + 1:
      spans[-1][1:] = [number]
    else:
      spans.append([number])
  return ",".join("-".join(map(str, span)) for span in spans) or "none"
