"""Reports results: a page of sweeps, a picture, CSV, or all pages of results.

  python scripts/report.py runs/sweep                  # runs/sweep/report.html
  python scripts/report.py --results=results           # README.md, docs/
  python scripts/report.py --picture=drafters.png \\
    lookup=runs/lookup/results.json draft=runs/draft/results.json
  python scripts/report.py --page=all.html runs/a runs/b runs/c/lines.jsonl
  python scripts/report.py --csv=all.csv runs/sweep lookup=runs/lookup.json

Curves and heatmaps of what was predicted and what was measured, acceptance by
position, a table to sort, the band of measured over predicted, and the batch at
which speculation stops paying. A point that several sweeps measured is pooled:
a machine whose speed comes and goes is judged better by more than one visit. A
broken line is reported and left out; nothing is written but the page.

With --results, the regions of Markdown pages (the arguments; by default
README.md and docs/) are written anew from what scripts/reproduce.py measured,
and so are pictures beside them.

With --picture, arguments are results of other programs. One FILE: T(n) where it
holds passes alone (bench.py --nodecode), else its runs. LABEL=FILE, or several
files: tokens per target step and speedup over k, a line each, of all prompts
together (--group for one category).

With --csv, every run of sweeps and of other programs' results is a row; columns
have the names of docs/schema.json with dots, as run.speed.speedup.value.
"""

import json
import sys
from pathlib import Path

from specdec.benchmark import sweeps
from specdec.cli import app, setup_flags
from specdec.report import (
  canvas,
  csv_rows,
  plots,
  regions,
  result_plots,
  sweep_page,
)
from specdec.utils import files, terminal


def define(flags: app.Flags) -> None:
  flags.string(
    "page", None, "File to write; default report.html in the one folder given."
  )
  flags.string("results", None, "Folder of reproduce.py: fill pages from it.")
  flags.string("picture", None, "Picture to write: .png, .svg or .pdf.")
  flags.string("csv", None, "Table to write, a row for every run.")
  flags.string("group", plots.ALL, "With --picture: which, of several files.")
  flags.string("title", None, "With --picture; default: what results say.")
  flags.string("pictures", None, "Folder for the page's pictures as PNG files.")


def page_of(options: app.Options, paths: list[Path]) -> str:
  """Returns the file to write; refuses arguments that do not exist."""
  if not paths:
    raise ValueError("give a folder of scripts/sweep.py, or several")
  if missing := [path for path in paths if not path.exists()]:
    raise ValueError(
      f"{missing[0]} does not exist; give a folder of scripts/sweep.py"
    )
  if options.page is not None:
    return options.page
  if len(paths) > 1 or not paths[0].is_dir():
    raise ValueError("give --page, the file to write")
  return str(paths[0] / "report.html")


def fill(options: app.Options) -> None:
  setup_flags.refuse(options, ["page", "pictures"], "is for sweeps")
  app.check_folder("--results", options.results)
  pages = [Path(argument) for argument in options.arguments]
  pages = pages or regions.pages(Path())
  if not pages:
    raise ValueError("there are no README.md and docs/ here; name pages")
  documents = regions.Documents(Path(options.results))
  if not len(documents):
    raise ValueError(
      f"--results={options.results} holds no results; scripts/reproduce.py "
      "measures them"
    )
  quick = [x for x in documents if documents[x]["measurement"]["quick"]]
  if quick and not options.arguments:
    raise ValueError(
      f"{options.results} has quick runs, no measurements ({quick[0]}): name "
      "the pages to fill"
    )
  for page in regions.rewrite(pages, documents):
    terminal.report(page)


def draw(options: app.Options) -> None:
  setup_flags.refuse(options, ["page", "pictures"], "is for sweeps")
  if not options.arguments:
    raise ValueError("give --picture and one or more files of results")
  app.check_writable("--picture", options.picture)
  group = options.group if "group" in options.given else None
  figure = result_plots.of_files(options.arguments, options.title, group)
  canvas.save(figure, options.picture)
  terminal.report(options.picture)


def tabulate(options: app.Options) -> None:
  setup_flags.refuse(options, ["page", "pictures"], "writes no CSV")
  if not options.arguments:
    raise ValueError("give --csv and folders of sweeps, or files of results")
  app.check_writable("--csv", options.csv)
  rows = csv_rows.of_files(options.arguments)
  files.replace_text(Path(options.csv), csv_rows.as_csv(rows))
  terminal.report(f"{options.csv}: {len(rows)} rows")


def report(options: app.Options) -> None:
  others = {"picture": draw, "csv": tabulate, "results": fill}
  given = [name for name in others if getattr(options, name)]
  if len(given) > 1:
    raise ValueError(f"give --{given[0]} or --{given[1]}, not both")
  if not options.picture:
    setup_flags.refuse(options, ["group", "title"], "is for --picture")
  if given:
    return others[given[0]](options)
  paths = [Path(argument) for argument in options.arguments]
  page = page_of(options, paths)
  app.check_writable("--page", page)
  if options.pictures:
    app.check_folder("--pictures", options.pictures)
  sweep = sweeps.read(paths)
  for text in sweep.broken:
    terminal.report(f"skipped: {text}", file=sys.stderr)
  header = paths[0] / "header.json"
  header = json.loads(header.read_text()) if header.is_file() else None
  files.replace_file(page, sweep_page.render(sweep, header))
  if options.pictures:
    folder = Path(options.pictures)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in sweep_page.figures(sweep.lines).items():
      canvas.save(figure, folder / f"{name}.png")
  drafted = [line for line in sweep.lines if line["run"]["k"]]
  groups = [*sweeps.by_setting(sweep.lines).items(), ("all", sweep.lines)]
  for name, lines in (*groups, ("without k = 0", drafted)):
    if lines:
      terminal.report(f"{name}: {sweeps.band(lines)}")
  terminal.report(page)


main = app.Program(__doc__, define, report, takes_arguments=True)
