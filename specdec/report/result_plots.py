"""Plots files of results: passes, the groups of one, curves of several."""

import json
from collections.abc import Sequence
from pathlib import Path

from specdec.report import plots
from specdec.utils.spelling import choices

ALL = "all"  # the group of all prompts together


def read(path: str | Path) -> dict:
  """Reads a document of results.

  Raises:
    ValueError: it is something else.
  """
  try:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error.msg})") from None
  version = document.get("format") if isinstance(document, dict) else None
  if not str(version).startswith("specdec/"):
    raise ValueError(f"{path} is none of this repository's results")
  return document


def title_of(documents: Sequence[dict]) -> str:
  """Returns what documents have in common: target, rule, temperature, device.

  Of documents without runs: dtype and context instead of rule and temperature.
  """
  if not documents[0]["runs"]:
    settings = documents[0]["settings"]
    return (
      f"{settings['target']}, {settings['dtype']}, context "
      f"{settings['context']}, {documents[0]['machine']['device']}"
    )
  parts = [
    {d["settings"]["target"] for d in documents},
    {f"{d['settings']['acceptance']} acceptance" for d in documents},
    {f"temperature {d['settings']['temperature']:g}" for d in documents},
    {d["machine"]["device"] for d in documents},
  ]
  return ", ".join(part.pop() for part in parts if len(part) == 1)


def single(document: dict, picture: str, title: str | None) -> None:
  """Plots the time of passes of a document without runs, else its groups.

  Args:
    picture: output file; its suffix selects the format.
    title: None: `title_of`.
  """
  title = title or title_of([document])
  if document["runs"]:
    caveats = sorted(document["caveats"])
    plots.by_group(document["runs"], picture, title, caveats)
  else:
    plots.passes(document["passes"], picture, title)


def several(
  files: Sequence[tuple[str, str]],
  picture: str,
  title: str | None,
  group: str = ALL,
) -> None:
  """Plots tokens per pass and speedup over k, a line for each document.

  Args:
    files: label and path of each.
    group: of prompts.

  Raises:
    ValueError: a file has no such group.
  """
  curves, documents = {}, [read(path) for _, path in files]
  for (label, path), document in zip(files, documents):
    curves[label] = [x for x in document["runs"] if x["group"] == group]
    if not curves[label]:
      groups = sorted({run["group"] for run in document["runs"]})
      raise ValueError(
        f"{path} has no group {group!r}; {choices(group, groups)}"
      )
  caveats = sorted({c for document in documents for c in document["caveats"]})
  plots.speed_over_k(curves, picture, title or title_of(documents), caveats)
