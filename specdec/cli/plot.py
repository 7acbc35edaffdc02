"""Plots results of bench.py and eval.py, several in one picture.

  python scripts/plot.py --picture=drafters.png \\
    'lookup=runs/lookup/results.json' 'draft=runs/draft/results.json'
  python scripts/plot.py --picture=passes.png bench.json

LABEL=FILE, or several files: tokens per pass and speedup over k, a line each,
of all prompts together (--group for one category). One FILE: T(n) where it
holds passes alone (bench.py --nodecode), else its groups.
"""

from pathlib import Path

from specdec.cli import app
from specdec.report import canvas, plots, result_plots
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("picture", None, "Picture to write: .png, .svg or .pdf.")
  flags.string("group", plots.ALL, "Which group, of several files.")
  flags.string("title", None, "Default: what the results say.")


def plot(options: app.Options) -> None:
  """Reads the files and plots them."""
  if not (options.arguments and options.picture):
    raise ValueError("give --picture and one or more files of results")
  app.check_writable("--picture", options.picture)
  paths = []
  for argument in options.arguments:
    label, _, path = argument.partition("=")
    unlabelled = Path(argument).exists() or not path
    paths.append((argument, argument) if unlabelled else (label, path))
  label, path = paths[0]
  if len(paths) > 1 or label != path:
    figure = result_plots.several(paths, options.title, options.group)
  elif "group" in options.given:
    raise ValueError("--group is for several files, or for LABEL=FILE")
  else:
    figure = result_plots.single(path, options.title)
  canvas.save(figure, options.picture)
  terminal.report(options.picture)


main = app.Program(__doc__, define, plot, takes_arguments=True)
