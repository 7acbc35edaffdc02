"""What a sweep's lines say: settings, the band of measured over predicted.

A line is a point that was measured, with its prediction (scripts/sweep.py).
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.benchmark import metrics
from specdec.roofline import theory


class Read(NamedTuple):
  """Files of lines."""

  lines: list[dict]  # measured points, each once
  failed: list[dict]  # points that only failed
  broken: list[str]  # what was skipped, a sentence each


def read(paths: Sequence[Path]) -> Read:
  """Reads files, or folders with a lines.jsonl.

  Of a point that stands twice in one, the last that was measured counts; those
  of several are `pooled`. Nothing is written.
  """
  by_point: dict[str, list[dict]] = {}
  failed, broken = {}, []
  for path in paths:
    measured = {}
    file = path / "lines.jsonl" if path.is_dir() else path
    text = file.read_text(encoding="utf-8")
    for number, row in enumerate(text.split("\n"), 1):
      if not row.strip():
        continue
      try:
        line = json.loads(row)
        # Another length of prompts, or mesh, is another measurement.
        place = line.get("context"), line.get("mesh")
        key = json.dumps([line["point"], *place], sort_keys=True)
        if "run" in line:
          line["run"]["speed"]["speedup"]["value"]
          if not 0 < line["prediction"]["speedup"] < np.inf:
            broken.append(
              f"line {number} of {file} predicts a speedup of "
              f"{line['prediction']['speedup']:g}; sweep.py --repredict "
              "predicts it again"
            )
            continue
          measured[key] = line
        else:
          failed[key] = {"point": line["point"], "error": line["error"]}
      except (ValueError, KeyError, TypeError, AttributeError):
        broken.append(f"line {number} of {file} is no point of a sweep")
    for key, line in measured.items():
      # Versions of a user's drafter are not pooled.
      whole = key + json.dumps(line.get("file_checksums"), sort_keys=True)
      by_point.setdefault(whole, []).append(line)
  if not by_point:
    names = ", ".join(map(str, paths))
    raise ValueError(f"no measured point in {names}; run scripts/sweep.py")
  lines = [pooled(some) for some in by_point.values()]
  done = [line["point"] for line in lines]
  left = [line for line in failed.values() if line["point"] not in done]
  return Read(lines, left, broken)


def pooled(lines: Sequence[dict]) -> dict:
  """Returns a point's lines of several sweeps as one.

  What was timed is summed up, and so is what each sweep predicted by its own
  calibration; the error is the spread between the sweeps. What else a line
  says is the last one's.
  """
  if len(lines) == 1:
    return lines[0]
  speed = metrics.speed_of([line["run"]["speed"] for line in lines])
  predictions = [line["prediction"] for line in lines]
  prediction = {
    name: float(np.mean([each[name] for each in predictions]))
    for name in predictions[0]
    if all(name in each for each in predictions)  # old ones have fewer
  }
  prediction["speedup"] = prediction["baseline_seconds"] / prediction["seconds"]
  return lines[-1] | {
    "run": lines[-1]["run"] | {"speed": dataclasses.asdict(speed)},
    "prediction": prediction,
    "rounds": sum(line["rounds"] for line in lines),
    "load": max(line["load"] for line in lines),
    "sweeps": len(lines),
  }


def ratio(line: dict) -> float:
  """Returns measured over predicted speedup."""
  speedup = line["run"]["speed"]["speedup"]["value"]
  return speedup / line["prediction"]["speedup"]


def of_formula(line: dict) -> float | None:
  """Returns measured speedup over `by_formula`; None where that is None."""
  predicted = by_formula(line)
  if predicted is None:
    return None
  return line["run"]["speed"]["speedup"]["value"] / predicted


def formula_ratios(lines: Sequence[dict]) -> list[float]:
  """Returns `of_formula` of the lines to which the formula applies."""
  return [x for x in map(of_formula, lines) if x is not None]


def by_formula(line: dict) -> float | None:
  """Returns the speedup by theorem 3.8 of Leviathan et al. (arXiv:2211.17192).

  That is by alpha and c alone. None without draft tokens, and for a drafter
  that does not draft in every round, as prompt lookup: the theorem is about k
  draft tokens in each.
  """
  run = line["run"]
  cost = line["prediction"].get("cost")  # which old sweeps lack
  if not run["k"] or cost is None or line["observed"]["wide"] < 1:
    return None
  alpha = run["acceptance"]["alpha"]
  curve = theory.iid_prefix_acceptance(alpha["value"], run["k"])
  return theory.speedup(curve, cost)


class Band(NamedTuple):
  """Of some cells, measured over predicted."""

  cells: int
  within: int  # of them between 0.90 and 1.10
  least: float
  median: float
  largest: float

  def __str__(self) -> str:
    return (
      f"{self.within} of {self.cells} cells within 0.90 to 1.10 "
      f"({self.within / self.cells:.0%}); {self.least:.2f} to "
      f"{self.largest:.2f}, median {self.median:.2f}"
    )


def band(lines: Sequence[dict]) -> Band:
  """Returns the band of those points."""
  ratios = np.array([ratio(line) for line in lines])
  within = int(np.sum((ratios >= 0.9) & (ratios <= 1.1)))
  spread = np.min(ratios), np.median(ratios), np.max(ratios)
  return Band(len(ratios), within, *map(float, spread))


def _grouped(
  lines: Iterable[dict], name: Callable[[dict], str]
) -> dict[str, list[dict]]:
  groups: dict[str, list[dict]] = {}
  for line in lines:
    groups.setdefault(name(line), []).append(line)
  return groups


def _place(line: dict) -> list[str]:
  point = line["point"]
  target, rule = point.get("target", ""), point.get("acceptance", "coupled")
  return [target, rule, f"T = {point.get('temperature', 0):g}"]


def setting(line: dict) -> str:
  """Returns what but k and batch tells points apart."""
  target, *rest = _place(line)
  mesh = [line["mesh"]] if line.get("mesh") else []
  return "; ".join([target, line["drafter"], *rest, *mesh])


def by_setting(lines: Sequence[dict]) -> dict[str, list[dict]]:
  """Groups points, by k and batch in each."""
  lines = sorted(lines, key=lambda x: (x["run"]["batch"], x["run"]["k"]))
  return _grouped(lines, setting)


def by_drafter(lines: Sequence[dict]) -> dict[str, list[dict]]:
  """Groups points that differ in the drafter alone, two drafters or more."""

  def name(line: dict) -> str:
    return "; ".join([*_place(line), f"batch {line['run']['batch']}"])

  return {
    name: group
    for name, group in _grouped(lines, name).items()
    if len({line["drafter"] for line in group}) > 1
  }


def crossover(lines: Sequence[dict]) -> tuple[int | None, int | None]:
  """Returns (predicted, measured): the batch of one setting from which on no k
  gains (measured: by more than its standard error); None where the largest
  does."""
  gains: dict[int, list[tuple[float, float]]] = {}
  for line in lines:
    if line["run"]["k"]:
      speed = line["run"]["speed"]["speedup"]
      least = speed["value"] - (speed["error"] or 0)
      both = line["prediction"]["speedup"], least
      gains.setdefault(line["run"]["batch"], []).append(both)
  starts: list[int | None] = [None, None]
  for which in range(2):
    for batch in sorted(gains, reverse=True):  # one between may lose by chance
      if max(both[which] for both in gains[batch]) > 1:
        break
      starts[which] = batch
  return tuple(starts)
