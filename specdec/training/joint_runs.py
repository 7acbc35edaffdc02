"""Compares finished runs of joint training with the baseline.

Invariant: runs are compared only if they had the same data, number of tokens,
options and held-out text; differences are between runs with the same initial
weights, seed by seed.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from specdec.benchmark import metrics
from specdec.benchmark.metrics import Estimate
from specdec.utils import files

BASELINE = "none"
# Settings in which kinds differ, and options in which runs may differ.
_KIND_SETTINGS = ("head_config", "loss", "layer_skip")
_FREE_OPTIONS = ("seed", "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True)
class Run:
  """One finished run.

  Attributes:
    settings: contents of run.json.
    loss: the target's held-out loss after the last step, in nats per token.
    tokens_per_pass: mean acceptance length of its drafter after the last step;
      None without a drafter.
  """

  folder: str
  settings: dict
  loss: float
  tokens_per_pass: float | None

  @property
  def kind(self) -> str:
    """Kind of the auxiliary loss; BASELINE without one."""
    return self.settings["kind"]

  @property
  def seed(self) -> int:
    """Seed of the initial weights and the order of the data."""
    return self.settings["options"]["seed"]

  @property
  def tokens(self) -> int:
    """Number of tokens trained on."""
    options = self.settings["options"]
    return options["steps"] * options["batch"] * options["sequence"]


@dataclasses.dataclass(frozen=True)
class Kind:
  """Runs of one kind.

  Attributes:
    loss: mean over seeds.
    difference: mean over seeds of the loss minus BASELINE's with the same seed;
      without a value if they have no seed in common.
    differences: seed -> difference.
    tokens_per_pass: mean over seeds; without a value without a drafter.
  """

  name: str
  runs: tuple[Run, ...]
  loss: Estimate
  difference: Estimate
  differences: dict[int, float]
  tokens_per_pass: Estimate

  @property
  def seeds(self) -> tuple[int, ...]:
    """Seeds of the runs."""
    return tuple(run.seed for run in self.runs)


def read(folder: Path) -> Run:
  """Reads a finished run.

  Raises:
    ValueError: it is not a run of train_joint.py, or not finished.
  """
  try:
    settings = json.loads((folder / "run.json").read_text())
    entries = files.read_json_lines(folder / "metrics.jsonl")
    steps = settings["options"]["steps"]
    settings["kind"]
  except (OSError, KeyError, TypeError, json.JSONDecodeError):
    raise ValueError(f"{folder} is not a run of train_joint.py") from None
  last = {x["kind"]: x for x in entries if x["step"] == steps}
  if "held_out" not in last:
    step = max((x["step"] for x in entries), default=0)
    raise ValueError(
      f"{folder} is not finished: its log is at step {step} of {steps}; the "
      "same command resumes it"
    )
  loss = last["held_out"]["loss"]
  if not math.isfinite(loss):
    raise ValueError(f"{folder}: held-out loss {loss}")
  decoding = last.get("decoding", {})
  return Run(str(folder), settings, loss, decoding.get("tokens_per_pass"))


def compare(runs: Sequence[Run]) -> list[Kind]:
  """Groups runs by kind, the baseline first.

  Raises:
    ValueError: there are none, two have the same kind and seed, or they differ
      in settings that must be equal.
  """
  if not runs:
    raise ValueError("no runs to compare")
  by_kind: dict[str, dict[int, Run]] = {}
  for run in runs:
    of_kind = by_kind.setdefault(run.kind, {})
    if run.seed in of_kind:
      raise ValueError(
        f"{of_kind[run.seed].folder} and {run.folder} have the same kind and "
        f"seed ({run.kind}, {run.seed})"
      )
    of_kind[run.seed] = run
  first = runs[0]
  for run in runs[1:]:
    _check_equal(first, run, _common)
    _check_equal(next(iter(by_kind[run.kind].values())), run, _of_kind)
  for seed in sorted({run.seed for run in runs}):
    same = [of_kind[seed] for of_kind in by_kind.values() if seed in of_kind]
    for run in same[1:]:
      _check_equal(same[0], run, _of_seed)
  order = sorted(by_kind, key=lambda name: (name != BASELINE, name))
  return [_kind(name, by_kind[name], by_kind.get(BASELINE)) for name in order]


def document(kinds: Sequence[Kind]) -> dict:
  """Returns a comparison as JSON values, every run included."""
  return {
    "format": "specdec-joint/1",
    "kinds": [
      {
        "kind": kind.name,
        "loss": dataclasses.asdict(kind.loss),
        "difference": dataclasses.asdict(kind.difference),
        "differences": {str(k): v for k, v in kind.differences.items()},
        "tokens_per_pass": dataclasses.asdict(kind.tokens_per_pass),
        "runs": [
          {
            "folder": run.folder,
            "seed": run.seed,
            "tokens": run.tokens,
            "loss": run.loss,
            "tokens_per_pass": run.tokens_per_pass,
          }
          for run in kind.runs
        ],
      }
      for kind in kinds
    ],
    "run_settings": kinds[0].runs[0].settings,
  }


def _kind(name: str, runs: dict[int, Run], baseline) -> Kind:
  differences = {}
  if baseline is not None and name != BASELINE:
    differences = {
      seed: runs[seed].loss - baseline[seed].loss
      for seed in sorted(runs)
      if seed in baseline
    }
  ordered = tuple(runs[seed] for seed in sorted(runs))
  lengths = [run.tokens_per_pass for run in ordered]
  return Kind(
    name,
    ordered,
    mean([run.loss for run in ordered]),
    mean(list(differences.values())),
    differences,
    mean([x for x in lengths if x is not None]),
  )


def mean(values: Sequence[float]) -> Estimate:
  """Estimates the mean over runs; its standard error needs at least two."""
  return metrics.ratio(values, [1.0] * len(values))


def _check_equal(one: Run, other: Run, select) -> None:
  differences = files.differences(select(one.settings), select(other.settings))
  if differences:
    raise ValueError(
      f"{one.folder} and {other.folder} cannot be compared: "
      f"{'; '.join(differences)}"
    )


def _common(settings: dict) -> dict:
  """Returns the settings that all runs must share."""
  common = {
    name: value
    for name, value in settings.items()
    if name not in ("kind", "options", "checksums", *_KIND_SETTINGS)
  }
  options = settings["options"].items()
  return common | {
    "options": {name: x for name, x in options if name not in _FREE_OPTIONS},
    "checksums": {
      name: x
      for name, x in settings["checksums"].items()
      if name != "first_weights"
    },
  }


def _of_kind(settings: dict) -> dict:
  return {name: settings.get(name) for name in _KIND_SETTINGS}


def _of_seed(settings: dict) -> dict:
  return {"first_weights": settings["checksums"]["first_weights"]}
