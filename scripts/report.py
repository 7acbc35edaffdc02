"""Makes one HTML page of one or several sweeps.

  python scripts/report.py runs/sweep                  # runs/sweep/report.html
  python scripts/report.py --page=all.html runs/a runs/b runs/c/lines.jsonl

Curves and heatmaps of what was predicted and what was measured, acceptance by
position, a table to sort, the band of measured over predicted, and the batch at
which speculation stops paying. A point that several sweeps measured is pooled:
a machine whose speed comes and goes is evaluated better by more than one visit.
A line that is broken is named and left out; nothing is written but the page.
"""

import json
import sys
from pathlib import Path

import _main
from absl import flags

from specdec.benchmark import sweeps
from specdec.report import canvas, sweep_page
from specdec.utils import files, terminal

_PAGE = flags.DEFINE_string(
  "page", None, "File to write; default report.html in the one folder given."
)
_PICTURES = flags.DEFINE_string(
  "pictures", None, "Folder for the page's pictures, as PNG as well."
)


def report(arguments: list[str]) -> None:
  """The whole run."""
  if not arguments:
    raise ValueError("give a folder of scripts/sweep.py, or several")
  paths = [Path(argument) for argument in arguments]
  for path in paths:
    if not path.exists():
      raise ValueError(
        f"{path} does not exist; give a folder of scripts/sweep.py"
      )
  page = _PAGE.value
  if page is None:
    if len(paths) > 1 or not paths[0].is_dir():
      raise ValueError("give --page, the file to write")
    page = str(paths[0] / "report.html")
  _main.check_writable("--page", page)
  if _PICTURES.value:
    _main.check_folder("--pictures", _PICTURES.value)
  found = sweeps.read(paths)
  for text in found.broken:
    terminal.report(f"skipped: {text}", file=sys.stderr)
  header = paths[0] / "header.json"
  known = json.loads(header.read_text()) if header.is_file() else None
  text = sweep_page.render(found, known)
  files.replace_file(page, text)
  if _PICTURES.value:
    folder = Path(_PICTURES.value)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in sweep_page.figures(found.lines).items():
      canvas.save(figure, folder / f"{name}.png")
  for name, some in sweeps.by_setting(found.lines).items():
    terminal.report(f"{name}: {sweeps.band(some)}")
  terminal.report(f"all: {sweeps.band(found.lines)}")
  evaluated = [line for line in found.lines if line["run"]["k"]]
  if evaluated:
    terminal.report(f"without k = 0: {sweeps.band(evaluated)}")
  terminal.report(page)


main = _main.main_of("report", report, takes_arguments=True)

if __name__ == "__main__":
  _main.start(main)
