"""Compares runs of train_joint.py: does an auxiliary loss help the target?

  for seed in 0 1 2; do for kind in none prophet mtp medusa layerskip; do
    python scripts/train_joint.py --config=configs/train/joint.py:$kind \\
      --config.options.seed=$seed --folder=runs/joint/$kind-$seed
  done; done
  python scripts/compare_joint.py 'runs/joint/*' --json=joint.json

Takes folders, or patterns of them. A line for each kind:

  loss             the target's on held-out text after the last step, with all
                   layers and without the auxiliary loss, in nats a token: the
                   mean over seeds and its standard error.
  less none's      the mean over seeds of the difference from the run of kind
                   none with the same seed: same initial weights, same batches
                   in the same order. Below 0 the auxiliary loss helped. What
                   two runs of a seed share cancels, so this is the error to
                   read.
  tokens per pass  of the drafter that was trained along, on held-out prompts.

Errors are standard errors over seeds. Three seeds have two degrees of freedom:
at the 5 % level a difference is significant from 4.3 standard errors on, not 2.
Runs with other data, tokens or held-out text are refused, and so are unfinished
ones.
"""

from specdec.benchmark import provenance, results
from specdec.cli import app
from specdec.report import joint_plots, training_tables
from specdec.training import joint_runs
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("json", None, "Write the results here as JSON, run by run.")
  flags.string("picture", None, "Picture to write: .png, .svg or .pdf.")


def plot(kinds: list[joint_runs.Kind], path: str) -> None:
  """Plots differences of held-out loss, and tokens per pass."""
  others = [kind for kind in kinds if kind.differences]
  drafting = [kind for kind in kinds if kind.tokens_per_pass.value is not None]
  tokens = kinds[0].runs[0].tokens
  joint_plots.losses(
    [(x.name, x.difference, list(x.differences.values())) for x in others],
    [
      (x.name, x.tokens_per_pass, [run.tokens_per_pass for run in x.runs])
      for x in drafting
    ],
    path,
    f"Joint training, {tokens / 1e6:.2f} M tokens each: points are seeds, "
    "bars standard errors",
  )


def compare(options: app.Options) -> None:
  """Reads, compares, prints, writes."""
  if not options.arguments:
    raise ValueError("give folders of train_joint.py, or patterns of them")
  app.check_writable("--json", options.json)
  app.check_writable("--picture", options.picture)
  folders = app.named_folders(options.arguments)
  runs = [joint_runs.read(folder) for folder in folders]
  kinds = joint_runs.compare(runs)
  terminal.report(f"  {runs[0].tokens:,} tokens each")
  rows = [
    (kind.name, kind.seeds, kind.loss, kind.difference, kind.tokens_per_pass)
    for kind in kinds
  ]
  terminal.report(training_tables.joint(rows))
  if options.json:
    settings = {"folders": [run.folder for run in runs]}
    document = provenance.header(settings, []) | joint_runs.document(kinds)
    results.write_json(options.json, document)
  if options.picture:
    plot(kinds, options.picture)


main = app.Program(__doc__, define, compare, takes_arguments=True)
