"""Prints and plots how drafters improved over the tokens they trained on.

  python scripts/training_curves.py 'runs/drafters/*' --picture=curves.png

Takes folders of train.py or train_drafter.py, or patterns of them; unfinished
runs may be among them. Tokens are counted from a run's own beginning, also
where it started from another's weights. A line for each, after its last
evaluation:

  kept           acceptance probability of a draft token drawn at temperature 1,
                 with held-out text as prefix, averaged over levels
  first          acceptance rate of a round's first draft token in decoding
  tokens a pass  of the target, in decoding
  last doubling  gain in tokens a pass from doubling the tokens trained on,
                 between half of the run and its end. Curves flatten: training
                 on brings at most that once more. Learning rates fall towards
                 the end of a run, which is part of it.
"""

from specdec.cli import app
from specdec.report import training_plots, training_tables
from specdec.training import curves
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("picture", None, "Picture to write: .png, .svg or .pdf.")
  flags.string("title", None, "The picture's; default: how many drafters.")


def show(options: app.Options) -> None:
  """Reads, prints, plots."""
  if not options.arguments:
    raise ValueError("give folders of train_drafter.py, or patterns of them")
  if options.title and not options.picture:
    raise ValueError("--title is for --picture")
  app.check_writable("--picture", options.picture)
  runs = [
    curves.read(folder) for folder in app.named_folders(options.arguments)
  ]
  rows = [
    (
      run.name,
      run.tokens[-1],
      run.k,
      run.acceptance[-1],
      run.first[-1],
      run.tokens_per_pass[-1],
      run.last_doubling,
    )
    for run in runs
  ]
  terminal.report(training_tables.curves(rows))
  if options.picture:
    title = options.title or f"Held-out acceptance of {len(runs)} drafters"
    lines = [(x.name, x.tokens, x.acceptance, x.tokens_per_pass) for x in runs]
    training_plots.curves(lines, options.picture, title)


main = app.Program(__doc__, define, show, takes_arguments=True)
