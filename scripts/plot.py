"""Draws results of bench.py and eval.py, several in one picture.

  python scripts/plot.py --picture=drafters.png \\
    'lookup=runs/lookup/results.json' 'draft=runs/draft/results.json'
  python scripts/plot.py --picture=passes.png bench.json

LABEL=FILE, two or more: tokens per pass and speedup over k, a line each, of
all prompts together (--group for one category). One file: T(n) where it holds
passes alone (bench.py --nodecode), else its groups.
"""

import json
from pathlib import Path

import _main
from absl import flags

from specdec.report import plots
from specdec.utils import terminal

_PICTURE = flags.DEFINE_string(
  "picture", None, "Picture to write: .png, .svg or .pdf."
)
_GROUP = flags.DEFINE_string("group", "all", "Which group of the results.")
_TITLE = flags.DEFINE_string("title", None, "Default: what the results say.")


def read(path: str) -> dict:
  """A document.

  Raises:
    ValueError: it is something else.
  """
  try:
    document = json.loads(Path(path).read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error.msg})") from None
  known = isinstance(document, dict) and str(document.get("format", ""))
  if not (known and known.startswith("specdec/")):
    raise ValueError(f"{path} is none of this repository's results")
  return document


def title_of(documents: list[dict]) -> str:
  """Target, rule, temperature and machine; those that all have alike."""
  if _TITLE.value:
    return _TITLE.value
  parts = [
    {d["settings"]["target"] for d in documents},
    {f"{d['settings']['acceptance']} acceptance" for d in documents},
    {f"temperature {d['settings']['temperature']:g}" for d in documents},
    {d["machine"]["device"] for d in documents},
  ]
  return ", ".join(part.pop() for part in parts if len(part) == 1)


def draw(arguments: list[str]) -> None:
  """The whole run."""
  if not (arguments and _PICTURE.value):
    raise ValueError("give --picture and one or more files of results")
  _main.check_writable("--picture", _PICTURE.value)
  named = [
    ("", "", argument) if Path(argument).exists() else argument.partition("=")
    for argument in arguments
  ]
  documents = [read(path) for _, _, path in named]
  first = documents[0]
  caveats = sorted({c for d in documents for c in d["caveats"]})
  if len(documents) == 1 and not first["runs"]:
    title = _TITLE.value or (
      f"{first['settings']['target']}, {first['settings']['dtype']}, context "
      f"{first['settings']['context']}, {first['machine']['device']}"
    )
    plots.passes(first["passes"], _PICTURE.value, title)
  elif len(documents) == 1 and not named[0][0]:
    plots.by_group(first["runs"], _PICTURE.value, title_of(documents), caveats)
  else:
    curves = {}
    for (label, _, path), document in zip(named, documents):
      runs = [r for r in document["runs"] if r["group"] == _GROUP.value]
      if not runs:
        known = ", ".join(sorted({r["group"] for r in document["runs"]}))
        raise ValueError(
          f"{path} has no group {_GROUP.value!r}; it has: {known}"
        )
      curves[label or path] = runs
    plots.speed_over_k(curves, _PICTURE.value, title_of(documents), caveats)
  terminal.report(_PICTURE.value)


main = _main.main_of("plot", draw, takes_arguments=True)

if __name__ == "__main__":
  _main.start(main)
