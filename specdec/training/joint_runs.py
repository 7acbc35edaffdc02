"""Finished runs of joint training, side by side: does the second loss help?

Invariant: numbers are set against each other only if the runs saw as many
tokens of the same data under the same options and were evaluated by the same
text; differences are of runs that began with the same weights, seed by seed.
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
# What may differ: how a run was watched, what tells the kinds apart, and the
# seed with what follows from it.
_OWN = ("head_config", "loss", "layer_skip")
_WATCHED = ("seed", "log_every", "eval_every", "save_every")


@dataclasses.dataclass(frozen=True)
class Run:
  """One finished run.

  Attributes:
    settings: its run.json.
    loss: the target's own on held-out text after the last step, nats a token.
    tokens_per_pass: of its drafter after the last step; None: it has none.
  """

  folder: str
  settings: dict
  loss: float
  tokens_per_pass: float | None

  @property
  def kind(self) -> str:
    return self.settings["kind"]

  @property
  def seed(self) -> int:
    return self.settings["options"]["seed"]

  @property
  def tokens(self) -> int:
    """That it was trained on."""
    options = self.settings["options"]
    return options["steps"] * options["batch"] * options["sequence"]


@dataclasses.dataclass(frozen=True)
class Kind:
  """Runs of one kind.

  Attributes:
    loss: mean over seeds.
    difference: mean over seeds of this loss less that of BASELINE with the same
      seed; no value where no seed has both.
    differences: those, by seed.
    tokens_per_pass: mean over seeds; no value without a drafter.
  """

  name: str
  runs: tuple[Run, ...]
  loss: Estimate
  difference: Estimate
  differences: dict[int, float]
  tokens_per_pass: Estimate

  @property
  def seeds(self) -> tuple[int, ...]:
    return tuple(run.seed for run in self.runs)


def read(folder: Path) -> Run:
  """A finished run.

  Raises:
    ValueError: it is none of train_joint.py, or has not ended.
  """
  try:
    settings = json.loads((folder / "run.json").read_text())
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(x) for x in text.splitlines() if x.endswith("}")]
    steps = settings["options"]["steps"]
    settings["kind"]
  except (OSError, KeyError, TypeError, json.JSONDecodeError):
    raise ValueError(f"{folder} is no run of train_joint.py") from None
  last = {x["kind"]: x for x in lines if x["step"] == steps}
  if "held_out" not in last:
    at = max((x["step"] for x in lines), default=0)
    raise ValueError(
      f"{folder} has not ended: its log stands at step {at} of {steps}; the "
      "same command goes on with it"
    )
  loss = last["held_out"]["loss"]
  if not math.isfinite(loss):
    raise ValueError(f"{folder}: held-out loss {loss}")
  decoding = last.get("decoding", {})
  return Run(str(folder), settings, loss, decoding.get("tokens_per_pass"))


def compare(runs: Sequence[Run]) -> list[Kind]:
  """Runs by kind, the baseline first.

  Raises:
    ValueError: there are none, two of one kind and seed, or they are not on
      equal terms.
  """
  if not runs:
    raise ValueError("no runs to compare")
  by_kind: dict[str, dict[int, Run]] = {}
  for run in runs:
    of_kind = by_kind.setdefault(run.kind, {})
    if run.seed in of_kind:
      raise ValueError(
        f"{of_kind[run.seed].folder} and {run.folder} are of one kind and "
        f"seed ({run.kind}, {run.seed})"
      )
    of_kind[run.seed] = run
  first = runs[0]
  for run in runs[1:]:
    _check(first, run, _shared)
    _check(next(iter(by_kind[run.kind].values())), run, _of_kind)
  for seed in sorted({run.seed for run in runs}):
    same = [of_kind[seed] for of_kind in by_kind.values() if seed in of_kind]
    for run in same[1:]:
      _check(same[0], run, _of_seed)
  order = sorted(by_kind, key=lambda name: (name != BASELINE, name))
  return [_kind(name, by_kind[name], by_kind.get(BASELINE)) for name in order]


def _kind(name: str, runs: dict[int, Run], baseline) -> Kind:
  differences = {}
  if baseline is not None and name != BASELINE:
    differences = {
      seed: runs[seed].loss - baseline[seed].loss
      for seed in sorted(runs)
      if seed in baseline
    }
  ordered = tuple(runs[seed] for seed in sorted(runs))
  passes = [run.tokens_per_pass for run in ordered]
  return Kind(
    name,
    ordered,
    mean([run.loss for run in ordered]),
    mean(list(differences.values())),
    differences,
    mean([x for x in passes if x is not None]),
  )


def mean(values: Sequence[float]) -> Estimate:
  """Of runs; its standard error needs two."""
  return metrics.ratio(values, [1.0] * len(values))


def _check(one: Run, other: Run, part) -> None:
  found = files.differences(part(one.settings), part(other.settings))
  if found:
    raise ValueError(
      f"{one.folder} and {other.folder} are not on equal terms: "
      f"{'; '.join(found)}"
    )


def _shared(settings: dict) -> dict:
  """What all runs have alike."""
  kept = {
    name: value
    for name, value in settings.items()
    if name not in ("kind", "options", "checksums", *_OWN)
  }
  options = settings["options"].items()
  return kept | {
    "options": {name: x for name, x in options if name not in _WATCHED},
    "checksums": {
      name: x
      for name, x in settings["checksums"].items()
      if name != "first_weights"
    },
  }


def _of_kind(settings: dict) -> dict:
  return {name: settings.get(name) for name in _OWN}


def _of_seed(settings: dict) -> dict:
  return {"first_weights": settings["checksums"]["first_weights"]}
