"""Tables of drafters trained with equal weights: configs/train/equal.py."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec.benchmark import metrics
from specdec.benchmark.scenario import Scenario
from specdec.report.tables import markdown, speedup_of
from specdec.roofline import chips, planning

# Published shapes of what was trained, for TARGET, and their longest draft.
TARGET, CONTEXT = "llama3-8b", 2048
TWINS = {
  "draft": ("model(llama3-1b)", 15),
  "eagle3": ("head(preset:eagle3)", 15),
  "dflash": ("head(preset:dflash)", 15),
  "dspark": ("head(preset:dspark)", 7),
}
CHIPS = "v6e", "h100"
AGAINST = "eagle3"


def kind_of(run: Mapping) -> str:
  """Returns the kind of a drafter in a folder KIND-SEED, or its call."""
  named = re.search(r"/([\w.]+)-\d+/", run["drafter"]["name"])
  return named[1] if named else run["drafter"]["name"]


def _chains(
  documents: Mapping, names: Sequence[str]
) -> dict[tuple[float, str], dict[int, list]]:
  """Runs by temperature and kind, and by k, in the order of their names."""
  groups: dict[tuple[float, str], dict[int, list]] = {}
  for run in (run for name in names for run in documents[name]["runs"]):
    drafter = run["drafter"]
    if drafter["shape"] == "chain":
      group = groups.setdefault((drafter["temperature"], kind_of(run)), {})
      group.setdefault(run["k"], []).append(run)
  return groups


def _by_k(
  groups: Mapping, temperature: float, value: Callable[[dict], float]
) -> str:
  rows = [
    {"kind": kind, "runs": by_k}
    for (of, kind), by_k in groups.items()
    if of == temperature
  ]
  ks = sorted({k for row in rows for k in row["runs"]})

  def cell(k: int, row: dict) -> str:
    runs = row["runs"].get(k, ())
    return str(metrics.mean([value(run) for run in runs])) if runs else ""

  def seeds(row: dict) -> int:
    return max(map(len, row["runs"].values()))

  columns = {"kind": "{[kind]}", "seeds": lambda row: str(seeds(row))}
  columns |= {f"k={k}": functools.partial(cell, k) for k in ks}
  return markdown(rows, columns)


def equal(documents: Mapping, *names: str) -> str:
  """Tokens per target step and speedups of every kind, means over seeds."""
  groups, parts = _chains(documents, names), []
  for temperature in sorted({temperature for temperature, _ in groups}):
    title = f"temperature {temperature:g}" if temperature else "greedy"
    for name, value in (
      (
        "tokens per target step",
        lambda x: x["acceptance"]["tokens_per_pass"]["value"],
      ),
      ("speedup", speedup_of),
    ):
      table = _by_k(groups, temperature, value)
      parts.append(f"{title}; {name}, means over seeds\n\n{table}")
  return "\n\n".join(parts)


def equal_priced(documents: Mapping, *names: str) -> str:
  """Predicts published shapes for an 8 B target by the acceptance measured.

  The acceptance by position is that of the longest chain, a mean over seeds; a
  model of the shipped target's size says how curves bend, not how high they
  are for an 8 B target. "Level" is how many tokens per target step that draft
  length would need to be as fast as AGAINST.
  """
  best = {}
  for (temperature, kind), by_k in _chains(documents, names).items():
    if kind in TWINS:
      for chip in CHIPS:
        best[temperature, kind, chip] = _best(kind, by_k, chip)
  rows = []
  for temperature, kind in dict.fromkeys(key[:2] for key in best):
    row = [f"{temperature:g}", kind, TWINS[kind][0]]
    for chip in CHIPS:
      point = best[temperature, kind, chip]
      other = best.get((temperature, AGAINST, chip))
      level = other and point.tokens * other.speedup / point.speedup
      row += [f"{point.speedup:.2f}, k = {point.k}", f"{point.tokens:.2f}"]
      row.append(f"{level:.2f}" if level else "")
    rows.append(row)
  names = ["temperature", "kind", "as"]
  for chip in CHIPS:
    names += [chip, f"tokens/pass, {chip}", f"level with {AGAINST} at, {chip}"]
  return markdown(rows, {x: f"{{[{i}]}}" for i, x in enumerate(names)})


def _best(kind: str, by_k: Mapping[int, Sequence], chip: str) -> planning.Point:
  """Returns the best draft length of a kind's twin on a chip."""
  drafter, most = TWINS[kind]
  curves = [
    [x["value"] or 0.0 for x in run["acceptance"]["conditional"]]
    for run in by_k[max(by_k)]
  ]
  size = min(most, *map(len, curves))
  prefix = np.cumprod(np.mean([x[:size] for x in curves], axis=0))
  scenario = Scenario.of(TARGET, drafter, chips.get(chip), most=size)
  return planning.best_k(scenario.pair, 1, CONTEXT, tuple(prefix), size)
