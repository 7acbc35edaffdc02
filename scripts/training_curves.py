"""Draws what training bought drafters, over the tokens they saw.

  python scripts/training_curves.py 'runs/drafters/*' --picture=curves.png

Folders of train.py or train_drafter.py, or patterns of them; runs that still go
on may be among them. Tokens are counted from a run's own beginning, also where
it went on from another's weights. A line for each: after the last evaluation,

  kept           the chance that a draft token drawn at temperature 1 is kept
  after
                 held-out text's own words, its mean over levels
  first          how often the first draft token of a round was kept in decoding
  tokens a pass  of the target, in decoding
  last doubling  what twice the tokens brought of that, between half of the run
                 and its end: what training on might bring once more, at most,
                 for such curves flatten. Learning rates fall towards a run's
                 end, which is part of it.
"""

import _folders
import _main
from absl import flags

from specdec.report import training_plots
from specdec.training import curves
from specdec.utils import terminal

_PICTURE = flags.DEFINE_string(
  "picture", None, "Picture to write: .png, .svg or .pdf."
)
_TITLE = flags.DEFINE_string("title", "", "What stands above it.")


def table(runs: list[curves.Curve]) -> str:
  """A line for each run."""
  header = (
    "run", "tokens", "k", "kept", "first", "tokens a pass", "last doubling"
  )  # fmt: skip
  rows = [
    (
      run.name,
      f"{run.tokens[-1]:,}",
      str(run.k),
      f"{run.acceptance[-1]:.3f}",
      f"{run.first[-1]:.2f}",
      f"{run.tokens_per_pass[-1]:.2f}",
      "-" if run.last_doubling is None else f"{run.last_doubling:+.2f}",
    )
    for run in runs
  ]
  return terminal.columns(header, rows)


def work(arguments: list[str]) -> None:
  """Reads, prints, draws."""
  if not arguments:
    raise ValueError("give folders of train_drafter.py, or patterns of them")
  if _PICTURE.value:
    _main.check_writable("--picture", _PICTURE.value)
  runs = [curves.read(folder) for folder in _folders.named(arguments)]
  terminal.report(table(runs))
  if _PICTURE.value:
    title = _TITLE.value or f"Held-out acceptance of {len(runs)} drafters"
    shown = [(x.name, x.tokens, x.acceptance, x.tokens_per_pass) for x in runs]
    training_plots.curves(shown, _PICTURE.value, title)


main = _main.main_of("training_curves", work, takes_arguments=True)

if __name__ == "__main__":
  _main.start(main)
