"""Runs measurements one after another, and keeps what each wrote.

Invariant: NAME.json is written when its measurement has ended, whole; what is
interrupted lies in the scratch folder, and the same call goes on from there. A
measurement is a process of its own: nothing compiled, cached or fragmented by
one is met by another.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.benchmark import provenance, sweeps
from specdec.benchmark.measurements.measurement import Measurement
from specdec.utils import files, run_folder

_DIGITS = 6  # significant ones of numbers that are kept
_LAST = 6  # lines of a program that failed
_HEAD = {"date", "versions", "command", "measurement"}  # of every document
Report = Callable[[str], object]


class Plan(NamedTuple):
  """How measurements are run.

  Attributes:
    results: folder of the JSON files.
    scratch: folder of what is not complete yet, and of logs.
    prompts: file of prompts of four kinds.
    quick: few prompts, few repetitions: to see that it works.
    again: also what was measured at another commit.
    forced: names of what is measured whatever is there.
    patience: seconds to wait for a machine that others use.
    launch: begins of a command, before a program's name.
  """

  results: Path
  scratch: Path
  prompts: str
  quick: bool = False
  again: bool = False
  forced: frozenset[str] = frozenset()
  patience: float = 60.0
  launch: tuple[str, ...] = (sys.executable, "-m", "specdec.cli.console")

  def command(self, one: Measurement) -> str:
    """Returns the command that repeats a measurement by itself."""
    return one.command(self._argv(one))

  def _argv(self, one: Measurement) -> list[str]:
    return one.argv(self.results, self.prompts, self.quick)

  def is_done(self, one: Measurement, commit: str | None) -> bool:
    """Whether its results are there, of this very command."""
    document = read(self.results, one.name)
    if document is None or one.name in self.forced:
      return False
    measured = document["versions"].get("commit")
    if self.again and (measured != commit or provenance.is_dirty(commit)):
      return False
    return document["command"] == self.command(one)

  def start(self, one: Measurement, log) -> subprocess.Popen:
    """Starts its process; its output goes to `log`."""
    folder = self.scratch / one.name
    place = folder if one.to == "output" else folder / "results.json"
    argv = [*self.launch, one.program, *self._argv(one), f"--{one.to}={place}"]
    names = dict(x.split("=", 1) for x in one.environment.split())
    return subprocess.Popen(
      argv,
      env={**os.environ, **names},
      stdout=log,
      stderr=subprocess.STDOUT,
      # Nobody else measures while it lives, even if this process is killed.
      pass_fds=[run_folder.lock_of(self.scratch)],
    )


def read(results: Path, name: str) -> dict | None:
  """Returns the document of a measurement, None where there is none."""
  path = results / f"{name}.json"
  if not path.is_file():
    return None
  try:
    document = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is no JSON ({error}); delete it") from error
  whole = isinstance(document, dict) and document.keys() >= _HEAD
  if not whole or not {"name", "quick"} <= {*(document["measurement"] or ())}:
    raise ValueError(
      f"{path} was not written by scripts/reproduce.py; delete it"
    )
  return document


def run(measurements: Sequence[Measurement], plan: Plan, report: Report):
  """Runs what is not there yet; returns the last lines of each that failed."""
  run_folder.lock(plan.scratch)
  commit, failed, left = provenance.commit(), {}, []
  for one in measurements:
    if plan.is_done(one, commit):
      report(f"{one.name}: kept")
    elif missing := one.missing():
      report(f"{one.name}: skipped, {missing}")
    else:
      left.append(one)
  taken = estimated = 0.0
  for number, one in enumerate(left, 1):
    rest = sum(other.minutes for other in left[number - 1 :])
    pace = taken / estimated if estimated else 1.0
    time_left = "" if plan.quick else f", {rest * pace:.0f} min left"
    report(
      f"[{number}/{len(left)}, {taken:.1f} min{time_left}] {one.name}: "
      f"{plan.command(one)}"
    )
    begun = time.monotonic()
    if error := _run_one(one, plan, commit, report):
      failed[one.name] = error
      report(f"{one.name}: failed; the others go on")
    taken += (time.monotonic() - begun) / 60
    estimated += one.minutes
  return failed


def _run_one(
  one: Measurement, plan: Plan, commit: str | None, report: Report
) -> str:
  """Runs one and keeps its document; returns why that failed, or nothing."""
  folder = plan.scratch / one.name
  stamp = json.dumps([commit, plan.command(one)])
  begun = folder / "begun.json"
  goes_on = begun.is_file() and begun.read_bytes() == stamp.encode()
  if not goes_on or provenance.is_dirty(commit):
    files.remove_folder(folder)  # of other sources, or flags
  folder.mkdir(parents=True, exist_ok=True)
  files.replace_text(begun, stamp)
  busy = _wait(plan.patience, report)
  start = time.monotonic()
  with (folder / "log.txt").open("w") as log:
    process = plan.start(one, log)
    try:
      status = process.wait()
    finally:
      if process.poll() is None:
        process.terminate()
        process.wait()
  if status:
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LAST:]) or f"exit status {status}"
  try:
    document = _collected(folder)
  except (OSError, ValueError) as error:
    return f"no results: {error}"
  about = {
    "name": one.name,
    "quick": plan.quick,
    "minutes": (time.monotonic() - start) / 60,
    "busy_cores": busy,
  }
  document = published(document, plan.command(one), about, commit)
  try:
    text = _text(document)
  except ValueError as error:
    return f"no results: {error}"
  files.replace_text(plan.results / f"{one.name}.json", text)
  files.remove_folder(folder)
  return ""


def _text(document: dict) -> str:
  """Serialises, a line for each member and each entry of a list of dicts."""

  def compact(value) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))

  members = []
  for name, value in document.items():
    text = compact(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
      text = "[\n" + ",\n".join(map(compact, value)) + "\n]"
    members.append(f"{compact(name)}:{text}")
  return "{" + ",\n".join(members) + "}\n"


def _wait(patience: float, report: Report) -> float | None:
  """Waits until the machine is quiet; returns how many cores are busy."""
  end = time.monotonic() + patience
  while (
    busy := provenance.busy_cores()
  ) is not None and busy > provenance.QUIET:
    if time.monotonic() > end:
      report(f"  warning: others keep {busy:.1f} cores busy")
      break
    time.sleep(min(3.0, patience))
  return busy


def _collected(folder: Path) -> dict:
  """Returns what a program wrote: its document, or a sweep as one."""
  if (folder / "header.json").is_file():
    header = json.loads((folder / "header.json").read_text())
    sweep = sweeps.read([folder])
    return header | {"lines": sweep.lines, "failed": sweep.failed}
  return json.loads((folder / "results.json").read_text())


def published(
  document: dict, command: str, about: dict, commit: str | None
) -> dict:
  """Returns a document as results/ keeps it: without texts, numbers rounded,
  and `about`, which docs/schema.json calls `measurement`."""
  document = {
    "date": provenance.now(),
    "versions": {"commit": commit},
    **{name: x for name, x in document.items() if name != "prompts"},
    "command": command,
    "measurement": about,
  }
  settings = document.get("settings", {})
  document["settings"] = {
    name: x for name, x in settings.items() if name not in ("json", "output")
  }
  return _rounded(document)


def _rounded(value):
  if isinstance(value, dict):
    return {name: _rounded(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_rounded(x) for x in value]
  return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
