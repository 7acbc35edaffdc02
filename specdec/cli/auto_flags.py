"""The flags of a Setup whose k may be auto."""

from specdec.benchmark import auto, calibrated
from specdec.cli import app, setup_flags
from specdec.cli.app import Flags, Options

_NAMES = ("most_k", "calibration", "explain")


def define(flags: Flags) -> None:
  """Defines them."""
  setup_flags.define(flags, auto=True)
  flags.integer("most_k", 8, "With --k=auto: the largest that is tried.")
  flags.string(
    "calibration",
    None,
    "With --k=auto: file of bench.py --calibrate; what it lacks is timed "
    "first, and kept. Default: one for each machine, in "
    "~/.cache/specdec/calibration.",
  )
  flags.bool(
    "explain", False, "With --k=auto: print what rounds cost, term by term."
  )


def read(options: Options) -> None:
  """Reads them; refuses what cannot work, or has no effect."""
  setup_flags.read(options)
  if options.k != ():
    setup_flags.refuse(options, _NAMES, "is for --k=auto")
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
  app.check_writable("--calibration", options.calibration)


def choose(options: Options, setup, target, rows) -> auto.Choice:
  """Chooses k for one batch of prompts."""
  return auto.choose(setup, target, rows, options.most_k, options.calibration)
