"""Compares training runs: learning curves, joint training, held-out losses.

  python scripts/compare_training.py 'runs/drafters/*' --picture=curves.png
  python scripts/compare_training.py --show=joint 'runs/joint/*' \\
    --json=joint.json
  python scripts/compare_training.py --show=losses --model=stdlib-11m \\
    --model=stdlib-1m --data=corpus/train --held_out=corpus/held_out

--show=curves takes folders of drafters, or patterns of them; unfinished runs
may be among them, and what is no drafter's run is left out. Tokens are counted
from a run's own beginning, also where it started from another's weights. A line
for each, after its last evaluation:

  kept           acceptance probability of a draft token drawn at temperature 1,
                 with held-out text as prefix, averaged over levels
  first          acceptance rate of a round's first draft token in decoding
  tokens/pass    new tokens per target step, in decoding
  last doubling  gain in tokens/pass from doubling the tokens trained on,
                 between half of the run and its end. Curves flatten: training
                 on brings at most that once more. Learning rates fall towards
                 the end of a run, which is part of it.

--show=joint: does an auxiliary loss help the target?

  for seed in 0 1 2; do for kind in none prophet mtp medusa layerskip; do
    python scripts/train.py --config=configs/train/joint.py:$kind \\
      --config.options.seed=$seed --folder=runs/joint/$kind-$seed
  done; done

Other data, tokens or held-out text are refused, and so are unfinished runs. A
line for each kind:

  loss             the target's on held-out text after the last step, with all
                   layers and without the auxiliary loss, in nats a token: the
                   mean over seeds and its standard error.
  less none's      the mean over seeds of the difference from the run of kind
                   none with the same seed: same initial weights, same batches
                   in the same order. Below 0 the auxiliary loss helped. What
                   two runs of a seed share cancels, so this is the error to
                   read. Three seeds have two degrees of freedom: at the 5 %
                   level a difference is significant from 4.3 standard errors
                   on, not 2.
  tokens/pass      new tokens per target step of the drafter that was trained
                   along, on held-out prompts.

--show=losses: held-out loss of models and of a smoothed 3-gram that they must
beat, in nats a token and in bits a byte. Models see the text in pieces of
--sequence tokens; the 3-gram, counted on --data with the first model's tokens,
sees all of it at once.
"""

import sys

from specdec.benchmark import provenance, results
from specdec.cli import app, setup_flags
from specdec.report import training, training_runs
from specdec.training import evaluate
from specdec.utils import terminal

FLAGS = {
  "curves": ("picture", "title"),
  "joint": ("picture", "json"),
  "losses": ("model", "data", "held_out", "sequence"),
}


def define(flags: app.Flags) -> None:
  flags.enum("show", "curves", list(FLAGS), "What to compare.")
  flags.string("picture", None, "Picture to write: .png, .svg or .pdf.")
  flags.string("title", None, "The picture's; default: how many drafters.")
  flags.string("json", None, "Write joint runs here as JSON, run by run.")
  flags.strings("model", [], "Named like --target of generate.py; repeatable.")
  flags.string("data", None, "Text that the 3-gram counts; default: no 3-gram.")
  flags.string("held_out", None, "Text to evaluate on.")
  flags.integer("sequence", 256, "Tokens that a model sees.")


def show_curves(options: app.Options) -> None:
  folders = app.named_folders(options.arguments)
  curves, others = training_runs.read_curves(folders)
  for why in others:
    terminal.report(f"left out: {why}", file=sys.stderr)
  terminal.report(training.curve_table(curves))
  if options.picture:
    title = options.title or f"Held-out acceptance of {len(curves)} drafters"
    training.plot_curves(curves, options.picture, title)


def show_joint(options: app.Options) -> None:
  folders = app.named_folders(options.arguments)
  runs = [training_runs.read_joint(folder) for folder in folders]
  kinds = training_runs.compare(runs)
  terminal.report(f"  {runs[0].tokens:,} tokens each")
  terminal.report(training.joint_table(kinds))
  if options.json:
    settings = {"folders": [run.folder for run in runs]}
    document = training_runs.joint_document(kinds)
    header = provenance.header(settings, [])
    results.write_json(options.json, header | document)
  if options.picture:
    training.plot_joint(kinds, options.picture)


def show_losses(options: app.Options) -> None:
  if options.arguments:
    raise ValueError("--show=losses takes --model, and no folders")
  if not (options.model and options.held_out):
    raise ValueError("give --model and --held_out")
  app.check_at_least(options, 1, "sequence")
  losses = evaluate.held_out_losses(
    options.model, options.held_out, options.sequence, options.data
  )
  rows = [
    (name, f"{nats:.3f} nats a token, {bits:.3f} bits a byte")
    for name, nats, bits in losses
  ]
  terminal.report(terminal.table(rows))


def compare(options: app.Options) -> None:
  setup_flags.refuse_others(options, "show", FLAGS)
  if options.show == "losses":
    show_losses(options)
    return
  if not options.arguments:
    raise ValueError("give folders of train.py, or patterns of them")
  if options.title and not options.picture:
    raise ValueError("--title is for --picture")
  app.check_writable("--json", options.json)
  app.check_writable("--picture", options.picture)
  show = {"curves": show_curves, "joint": show_joint}[options.show]
  show(options)


main = app.Program(__doc__, define, compare, takes_arguments=True)
