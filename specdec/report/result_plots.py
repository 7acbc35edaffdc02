"""Plots files of results: passes, the groups of one, curves of several."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from specdec.report import plots
from specdec.utils.spelling import choices


def read(path: str | Path) -> dict:
  """Reads a document of results, and refuses everything else."""
  try:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error.msg})") from None
  version = document.get("format") if isinstance(document, dict) else None
  if not str(version).startswith("specdec/"):
    raise ValueError(f"{path} is none of this repository's results")
  return document


def labelled(argument: str) -> tuple[str | None, Path]:
  """Splits LABEL=FILE; of a FILE that exists or has no LABEL, that is None."""
  label, _, path = argument.partition("=")
  if Path(argument).exists() or not path:
    return None, Path(argument)
  return label, Path(path)


def of_files(
  arguments: Sequence[str], title: str | None, group: str | None
) -> Figure:
  """Plots one FILE, or several and those with a LABEL over k.

  Args:
    group: of prompts, where there are several; None: all of them.

  Raises ValueError where two have one label, or one holds nothing to plot.
  """
  named = [labelled(argument) for argument in arguments]
  documents = {str(label or path): read(path) for label, path in named}
  if len(documents) < len(named):
    raise ValueError("two files have one label; give LABEL=FILE for each")
  several = len(documents) > 1 or named[0][0]
  for label, document in documents.items():
    if "runs" not in document and (several or "passes" not in document):
      raise ValueError(f"{label} holds no runs to plot")
  if several:
    return of_documents(documents, title, group or plots.ALL)
  if group is not None:
    raise ValueError("--group is for several files, or for LABEL=FILE")
  [document] = documents.values()
  return of_document(document, title)


def of_document(document: dict, title: str | None = None) -> Figure:
  """Plots what a document holds, as the program that wrote it does."""
  runs, settings = document.get("runs", ()), document["settings"]
  caveats = sorted(document["caveats"])
  if runs and "drafter" in runs[0]:
    title = title or f"Drafters of {settings['target']}"
    return plots.over_drafters(runs, title, caveats)
  if runs and "comparison" in runs[0]:
    names = "{target}, {drafter}, temperature {temperature:g}"
    return plots.over_sizes(runs, title or names.format(**settings), caveats)
  title = title or _title([document])
  if not runs:
    return plots.passes(document["passes"], title)
  return plots.by_group(runs, title, caveats)


def of_documents(
  documents: dict[str, dict], title: str | None = None, group: str = plots.ALL
) -> Figure:
  """Plots tokens per target step and speedup over k of one group of prompts, a
  line for each document. The title is by default what they have in common."""
  curves = {}
  for label, document in documents.items():
    curves[label] = [x for x in document["runs"] if x["group"] == group]
    if not curves[label]:
      groups = sorted({run["group"] for run in document["runs"]})
      raise ValueError(
        f"{label} has no group {group!r}; {choices(group, groups)}"
      )
  several = [*documents.values()]
  caveats = sorted({c for document in several for c in document["caveats"]})
  return plots.over_k(curves, title or _title(several), caveats)


def _title(documents: Sequence[dict]) -> str:
  """Returns what documents have in common: target, rule, temperature, device.

  Of documents without runs: dtype and context instead of rule and temperature.
  """
  forms = ["{acceptance} acceptance", "temperature {temperature:g}"]
  if not documents[0].get("runs"):
    forms = ["{dtype}", "context {context}"]
  parts = []
  for form in ("{target}", *forms, "{device}"):
    texts = {form.format(**d["settings"] | d["machine"]) for d in documents}
    parts += texts if len(texts) == 1 else ()
  return ", ".join(parts)
