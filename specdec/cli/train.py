"""Trains a language model, a draft of one, or a drafter inside one.

  python scripts/train.py --config=configs/train/target.py --folder=runs/target
  python scripts/train.py --config=configs/train/draft.py --folder=runs/draft
  python scripts/train.py --config=configs/train/drafter.py:prophet \\
    --folder=runs/prophet
  python scripts/train.py --config=configs/train/joint.py:prophet \\
    --folder=runs/joint/prophet-0
  python scripts/train.py ... --config.options.steps=50   # any entry, by name

What is trained follows from the config's entries:

  model                  a language model on text; with `target` a draft that is
                         distilled from it
  head_config, no model  a drafter that reads the hidden states of `target`,
                         which is frozen: dflash, dspark, eagle3, mtp, prophet
                         and others, the word after the colon. acceptance_j (at
                         temperature 1) and agreement_j in the log have the text
                         itself as prefix, decoding lines the draft
  model, and an entry    a target from scratch with an auxiliary loss, whose
  head_config or         gradient reaches it: of a drafter (head_config and
  layer_skip             loss), of LayerSkip (random layer dropout, losses at
                         early exits), or layer_skip=None, the baseline.
                         Held-out losses are the target's, with all layers.
                         compare_training.py compares such runs

The same command again resumes a run that was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
program here and transformers load; a drafter that was trained along is
drafter.safetensors in them), or best.safetensors and last.safetensors (a
drafter: head config, vocabulary, weights), metrics.jsonl, TensorBoard's files
under tensorboard/ and the resumable state under checkpoints/. At every
evaluation a drafter decodes held-out prompts with the real loop and rule.
"""

import dataclasses
import os

from specdec.cli import app, setup_flags
from specdec.report import training
from specdec.training import train_drafter, train_joint, train_model
from specdec.training.setup import HeadSetup, ModelSetup, from_config
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  flags.config(
    "config",
    "File whose get_config() says what to train, on what, how.",
    "train/*.py",
  )
  flags.string("folder", None, "Folder of the run.")
  flags.integer(
    "time_steps",
    0,
    "Time so many steps, and a matrix product for comparison, and stop there.",
  )
  flags.string(
    "profile", None, "Folder for a trace of five steps, for XProf to show."
  )
  setup_flags.define_mesh(flags)


def check(options: app.Options, setup: object) -> None:
  app.check_at_least(options, 0, "time_steps")
  if not isinstance(setup, ModelSetup):
    why = "is for a language model or a draft of one; this config has another"
    setup_flags.refuse(options, ("time_steps",), why)
  parts = (getattr(setup, x, None) for x in ("target", "head_config"))
  if options.draft_ways is not None and options.mesh is None:
    raise ValueError("--draft_ways is for --mesh")
  if options.draft_ways is not None and not any(parts):
    raise ValueError("--draft_ways is for a config with a target or a head")
  if options.time_steps:
    why = (
      "has no effect with --time_steps, which times one device; leave it out"
    )
    setup_flags.refuse(options, ("folder", "mesh", "profile"), why)


def train(options: app.Options) -> None:
  if options.config is None:
    raise ValueError("give --config, as configs/train/target.py")
  setup = from_config(options.config.to_dict())
  check(options, setup)
  if options.profile:
    app.check_folder("--profile", options.profile)
    again = dataclasses.replace(setup.options, profile=options.profile)
    setup = dataclasses.replace(setup, options=again)
  setup_flags.join(options)
  if options.time_steps:
    speed = train_model.load(setup).time_steps(options.time_steps)
    terminal.report(training.speed_table(*speed, load=os.getloadavg()))
    return
  folder = app.take_folder("--folder", options.folder)
  where = options.mesh, options.draft_ways
  if isinstance(setup, ModelSetup):
    train_model.load(setup, *where).train(folder)
  elif isinstance(setup, HeadSetup):
    train_drafter.train(setup, folder, *where)
  else:
    train_joint.train(setup, folder, *where)


main = app.Program(__doc__, define, train, interrupted=app.CONTINUES)
