"""Reads training runs: learning curves, and kinds of joint training compared.

Invariant: numbers come from a run's metrics.jsonl; nothing is extrapolated.
Joint runs are compared only if they had the same data, number of tokens,
options and held-out text; differences are between runs with the same initial
weights, seed by seed.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec.benchmark import metrics
from specdec.benchmark.metrics import Estimate
from specdec.utils import files, run_folder

BASELINE = "none"
# Settings in which kinds differ, and options in which runs may differ.
_KIND_SETTINGS = ("head_config", "loss", "layer_skip")
_FREE_OPTIONS = ("seed", "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True)
class Curve:
  """The evaluations of a drafter's run, in order of steps."""

  name: str  # of the run's folder
  tokens: tuple[int, ...]  # of text trained on
  tokens_per_pass: tuple[float, ...]  # mean acceptance length in decoding
  first: tuple[float, ...]  # acceptance rate of a round's first draft token
  # Teacher-forced acceptance probability of a draft token sampled at
  # temperature 1, averaged over levels.
  acceptance: tuple[float, ...]
  k: int  # draft tokens in each round

  @property
  def last_doubling(self) -> float | None:
    """Gain in tokens_per_pass from the last doubling of training tokens.

    Interpolates linearly in the logarithm of tokens. None: the first evaluation
    came after half of the tokens.
    """
    half = self.tokens[-1] / 2
    if half < self.tokens[0]:
      return None
    before = np.interp(
      math.log(half), np.log(self.tokens), self.tokens_per_pass
    )
    return self.tokens_per_pass[-1] - float(before)


class NoCurve(ValueError):
  """Says why a folder has no learning curve."""


def read_curves(folders: Sequence[Path]) -> tuple[list[Curve], list[str]]:
  """Reads the runs of drafters among folders, and says why others are none.

  Raises:
    NoCurve: none of them is one.
  """
  curves, others = [], []
  for folder in folders:
    try:
      curves.append(read_curve(folder))
    except NoCurve as error:
      others.append(str(error))
  if not curves:
    raise NoCurve("; ".join(others))
  return curves, others


def read_curve(folder: Path) -> Curve:
  """Reads a drafter's run of train.py, finished or not, with an evaluation."""
  try:
    settings, entries = _read(folder)
    options, decoding = settings["options"], settings["decoding"]
    tokens_per_step = options["batch"] * options["sequence"]
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise NoCurve(f"{folder} is not a run of a drafter") from error
  held_out = {x["step"]: x for x in entries if x["kind"] == "held_out"}
  decoded = {x["step"]: x for x in entries if x["kind"] == "decoding"}
  steps = sorted(held_out.keys() & decoded.keys())
  if not steps:
    raise NoCurve(f"{folder} has no evaluation yet")

  levels = [
    [x for name, x in held_out[step].items() if name.startswith("acceptance")]
    for step in steps
  ]
  return Curve(
    folder.name,
    tuple(step * tokens_per_step for step in steps),
    tuple(decoded[step]["tokens_per_pass"] for step in steps),
    tuple(decoded[step]["prefix_acceptance"][0] for step in steps),
    tuple(sum(x) / len(x) for x in levels),
    decoding["k"],
  )


@dataclasses.dataclass(frozen=True)
class JointRun:
  """One finished run of joint training."""

  folder: str
  seed: int
  tokens: int  # trained on
  loss: float  # the target's on held-out text at the end, in nats per token
  tokens_per_pass: float | None  # of its drafter at the end
  kind: str  # of the auxiliary loss; BASELINE without one
  settings: dict  # contents of run.json


@dataclasses.dataclass(frozen=True)
class Kind:
  """Runs of one kind, and means over seeds; without a value where none has."""

  kind: str
  loss: Estimate
  difference: Estimate  # of the loss, from BASELINE's with the same seed
  differences: dict[int, float]  # seed -> difference
  tokens_per_pass: Estimate
  runs: tuple[JointRun, ...]  # in order of seeds


def read_joint(folder: Path) -> JointRun:
  """Reads a finished run of joint training."""
  try:
    settings, entries = _read(folder)
    kind, options = settings["kind"], settings["options"]
    steps = options["steps"]
  except (OSError, KeyError, TypeError, json.JSONDecodeError):
    raise ValueError(f"{folder} is not a run of joint training") from None
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
  return JointRun(
    str(folder),
    options["seed"],
    steps * options["batch"] * options["sequence"],
    loss,
    last.get("decoding", {}).get("tokens_per_pass"),
    kind,
    settings,
  )


def compare(runs: Sequence[JointRun]) -> list[Kind]:
  """Groups runs by kind, the baseline first; refuses two of one kind and seed,
  and other settings that must be equal."""
  if not runs:
    raise ValueError("no runs to compare")
  by_kind: dict[str, dict[int, JointRun]] = {}
  first_of: dict[tuple, tuple[JointRun, dict]] = {}
  for run in runs:
    of_kind = by_kind.setdefault(run.kind, {})
    if run.seed in of_kind:
      raise ValueError(
        f"{of_kind[run.seed].folder} and {run.folder} have the same kind and "
        f"seed ({run.kind}, {run.seed})"
      )
    of_kind[run.seed] = run
    for group, shared in _shared(run).items():
      first, expected = first_of.setdefault(group, (run, shared))
      run_folder.check_same(
        f"{first.folder} and {run.folder} cannot be compared", expected, shared
      )
  order = sorted(by_kind, key=lambda name: (name != BASELINE, name))
  return [_kind(by_kind[x], by_kind.get(BASELINE, {})) for x in order]


def _kind(by_seed: dict[int, JointRun], baseline: dict[int, JointRun]) -> Kind:
  runs = tuple(by_seed[seed] for seed in sorted(by_seed))
  differences = {
    run.seed: run.loss - baseline[run.seed].loss
    for run in runs
    if run.seed in baseline and run.kind != BASELINE
  }
  lengths = [run.tokens_per_pass for run in runs]
  return Kind(
    runs[0].kind,
    metrics.mean([run.loss for run in runs]),
    metrics.mean(list(differences.values())),
    differences,
    metrics.mean([x for x in lengths if x is not None]),
    runs,
  )


def joint_document(kinds: Sequence[Kind]) -> dict:
  """Returns a comparison as JSON values, every run included."""
  documents = [dataclasses.asdict(kind) for kind in kinds]
  for document in documents:
    for run in document["runs"]:
      del run["kind"], run["settings"]
  return {
    "format": "specdec-joint/1",
    "kinds": documents,
    "run_settings": kinds[0].runs[0].settings,
  }


def _read(folder: Path) -> tuple[dict, list[dict]]:
  """Reads a run's settings and log."""
  settings = json.loads((folder / "run.json").read_text(encoding="utf-8"))
  return settings, files.read_json_lines(folder / "metrics.jsonl")


def _shared(run: JointRun) -> dict[tuple, dict]:
  """Returns what all runs, those of a kind, and those of a seed must share."""
  settings = run.settings
  options, checksums = settings["options"], dict(settings["checksums"])
  first_weights = checksums.pop("first_weights")
  free = ("kind", *_KIND_SETTINGS)
  common = {name: x for name, x in settings.items() if name not in free}
  common["options"] = {
    name: x for name, x in options.items() if name not in _FREE_OPTIONS
  }
  common["checksums"] = checksums
  return {
    (): common,
    ("kind", run.kind): {name: settings.get(name) for name in _KIND_SETTINGS},
    ("seed", run.seed): {"first_weights": first_weights},
  }
