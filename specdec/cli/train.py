"""Trains a language model, or distils a draft from its target.

  python scripts/train.py --config=configs/train/target.py --folder=runs/target
  python scripts/train.py --config=configs/train/draft.py --folder=runs/draft
  python scripts/train.py ... --config.options.steps=50   # any entry, by name

The same command again resumes a run that was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
program here and transformers load), metrics.jsonl, TensorBoard's files under
tensorboard/ and the resumable state under checkpoints/. A draft is evaluated,
at every evaluation, by decoding with its target.
"""

import os

from specdec.cli import app, setup_flags, training_flags
from specdec.report import training_tables
from specdec.training import train_model
from specdec.training.setup import ModelSetup
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  training_flags.define(flags)
  flags.integer(
    "time_steps",
    0,
    "Time so many steps, and a matrix product for comparison, and stop there.",
  )
  setup_flags.define_mesh(flags)


def check(options: app.Options, setup: ModelSetup) -> None:
  """Refuses flags that would have no effect."""
  app.check_at_least(options, 0, "time_steps")
  if options.draft_ways is not None and options.mesh is None:
    raise ValueError("--draft_ways is for --mesh")
  if options.draft_ways is not None and not setup.target:
    raise ValueError("--draft_ways is for a config with a target")
  if options.time_steps:
    why = (
      "has no effect with --time_steps, which times one device; leave it out"
    )
    setup_flags.refuse(options, ("folder", "mesh"), why)


def train(options: app.Options) -> None:
  """Checks everything, then trains."""
  setup = training_flags.read(options, ModelSetup)
  check(options, setup)
  setup_flags.join(options)
  if options.time_steps:
    speed = train_model.load(setup).time_steps(options.time_steps)
    terminal.report(training_tables.speed(*speed, load=os.getloadavg()))
    return
  folder = app.take_folder("--folder", options.folder)
  train_model.load(setup, options.mesh, options.draft_ways).train(folder)


main = app.Program(__doc__, define, train, interrupted=app.CONTINUES)
