"""The flags of a Setup whose k may be auto or adaptive."""

import dataclasses

from specdec.benchmark import auto, calibrated
from specdec.benchmark.setup import Setup
from specdec.cli import app, setup_flags
from specdec.cli.app import Flags, Options
from specdec.report import tables
from specdec.utils import terminal

_NAMES = ("most_k", "calibration", "explain")


def define(flags: Flags) -> None:
  """Defines them."""
  setup_flags.define(flags, auto=True)
  largest = "With --k=auto or adaptive: the largest that is tried."
  flags.integer("most_k", 8, largest)
  flags.string(
    "calibration",
    None,
    "With --k=auto or adaptive: file of bench.py --calibrate; what it lacks is "
    "timed first, and kept. Default: one for each machine, in "
    "~/.cache/specdec/calibration.",
  )
  flags.bool(
    "explain", False, "With --k=auto: print what rounds cost, term by term."
  )


def read(options: Options) -> None:
  """Reads them; refuses what cannot work, or has no effect."""
  setup_flags.read(options)
  if options.k != ():
    setup_flags.refuse(options, _NAMES, "is for --k=auto or --k=adaptive")
    return
  if not 1 <= options.most_k < options.max_new_tokens:
    raise ValueError(
      f"--most_k={options.most_k}; it must be >= 1 and leave room in "
      f"--max_new_tokens={options.max_new_tokens}"
    )
  setup = setup_flags.setup_of(options, k=1, batch=1)
  calibrated.check(setup)
  if setup.most_levels is not None:  # a head has no more
    options.most_k = min(options.most_k, setup.most_levels)
  if options.adaptive:
    setup_flags.refuse(options, ["explain"], "is for --k=auto")
    setup_flags.setup_of(options, k=options.most_k, batch=1, shape="adaptive")
  app.check_writable("--calibration", options.calibration)


def decide(
  options: Options, setup, target, rows
) -> tuple[Setup, auto.Choice | None]:
  """Returns the setup with the k that pays for one batch of prompts, or with
  the shape that finds it in every round, and prints why."""
  arguments = setup, target, rows, options.most_k, options.calibration
  if options.adaptive:
    setup = auto.adaptive(*arguments)
    text = f"k = {setup.k} at most, {setup.shape} (batch {setup.batch})"
    terminal.report(text)
    return setup, None
  choice = auto.choose(*arguments)
  terminal.report(tables.of_choice(choice, setup.batch, options.explain))
  return dataclasses.replace(setup, k=choice.k), choice
