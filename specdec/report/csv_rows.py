"""Rows of results for spreadsheets and data frames: a run each, flat."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.benchmark import sweeps
from specdec.report import result_plots

_RESULTS = "results.json"  # of programs that decode prompts, at their end


def flat(entry: object, name: str = "") -> Iterator[tuple[str, object]]:
  """Yields (name, value) for every leaf, 'acceptance.conditional.1.value' for
  example; parts of a list count from 1."""
  if isinstance(entry, dict):
    parts = entry.items()
  elif isinstance(entry, list):
    parts = enumerate(entry, 1)
  else:
    yield name, entry
    return
  for key, part in parts:
    yield from flat(part, f"{name}.{key}" if name else str(key))


def read(path: Path, label: str | None = None) -> list[dict]:
  """Returns the rows of a run's folder, of a sweep's lines, or of a document of
  results.

  Args:
    label: what the column `label` has in each; None: the path.

  Raises:
    ValueError: it is neither, is not there, or has no run.
  """
  if not path.exists():
    raise ValueError(f"{path} does not exist")
  if (path / _RESULTS).exists():
    path /= _RESULTS
  elif path.is_dir() and not (path / "lines.jsonl").exists():
    raise ValueError(f"{path} is no folder of a sweep, nor of another run")
  if path.is_dir() or path.suffix == ".jsonl":
    document = {"lines": sweeps.read([path]).lines}
  else:
    document = result_plots.read(path)
  entries = document.get("lines") or [
    {"settings": document["settings"], "run": run}
    for run in document.get("runs", ())
  ]
  if not entries:
    raise ValueError(f"{path} has no run, the rows of a CSV file")
  return [
    {"label": label or str(path), **dict(flat(entry))} for entry in entries
  ]


def of_files(arguments: Sequence[str]) -> list[dict]:
  """Returns the rows of FILEs, folders of sweeps and LABEL=FILEs."""
  named = map(result_plots.labelled, arguments)
  return [row for label, path in named for row in read(path, label)]


def as_csv(rows: Sequence[dict]) -> str:
  """Returns rows with all their columns, empty where one has none."""
  columns = dict.fromkeys(name for row in rows for name in row)
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue()
