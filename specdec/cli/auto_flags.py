"""The flags of a Setup whose k may be auto or adaptive."""

import dataclasses
from collections.abc import Iterator, Sequence

from specdec.benchmark import auto, calibrated
from specdec.benchmark.setup import Setup
from specdec.cli import app, setup_flags
from specdec.cli.app import Flags, Options
from specdec.report import tables
from specdec.utils import terminal

_COSTS = ("most_k", "calibration")  # what k is chosen from


def define(flags: Flags, lengths: bool = False) -> None:
  """Defines them, and with `lengths` --length."""
  setup_flags.define(flags, auto=True)
  where = "With --k=auto or adaptive"
  if lengths:
    _define_length(flags)
    where += ", or --length"
  _define_costs(flags, where)
  flags.bool(
    "explain", False, "With --k=auto: print what rounds cost, term by term."
  )


def _define_costs(flags: Flags, where: str) -> None:
  """Defines what k is chosen from."""
  flags.integer("most_k", 8, f"{where}: the largest that is tried.")
  flags.string(
    "calibration",
    None,
    f"{where}: file of bench.py --calibrate; what it lacks is timed first, and "
    "kept. Default: one for each machine, in ~/.cache/specdec/calibration.",
  )


def define_lengths(flags: Flags) -> None:
  """Defines ways of deciding k that are compared with numbers."""
  _define_length(flags)
  _define_costs(flags, "With --length")


def _define_length(flags: Flags) -> None:
  flags.strings(
    "length",
    [],
    "Besides the numbers of --k: auto, adaptive, or a shape that ends chains, "
    "such as 'entropy(limit=0.4)'; repeatable.",
  )


def read(options: Options) -> None:
  """Reads them; refuses what cannot work, or has no effect."""
  setup_flags.read(options)
  if options.k != () or options.adaptive:
    setup_flags.refuse(options, ["explain"], "is for --k=auto")
  if getattr(options, "length", ()):
    if options.k == ():
      raise ValueError("--length is compared with numbers of --k; give some")
    check_lengths(options)
    return
  if options.k != ():
    other = " or --length" if hasattr(options, "length") else ""
    why = f"is for --k=auto or --k=adaptive{other}"
    setup_flags.refuse(options, _COSTS, why)
    return
  _check_costs(options)
  calibrated.check(setup_flags.setup_of(options, k=1, batch=1))
  if options.adaptive:
    setup_flags.setup_of(options, k=options.most_k, batch=1, shape="adaptive")


def _check_costs(options: Options) -> None:
  """Checks what k is chosen from; a head's levels bound --most_k."""
  if not 1 <= options.most_k < options.max_new_tokens:
    raise ValueError(
      f"--most_k={options.most_k}; it must be >= 1 and leave room in "
      f"--max_new_tokens={options.max_new_tokens}"
    )
  if options.drafter == "none":
    raise ValueError("--drafter=none drafts nothing: there is no k to choose")
  whole = {"k": options.most_k, "batch": 1, "shape": "chain"}
  levels = setup_flags.setup_of(options, **whole).most_levels
  if levels is not None:  # a head has no more
    options.most_k = min(options.most_k, levels)
  app.check_writable("--calibration", options.calibration)


def check_lengths(options: Options) -> None:
  """Refuses values of --length that cannot work, and flags without it."""
  if not options.length:
    setup_flags.refuse(options, _COSTS, "is for --length")
    return
  _check_costs(options)
  for name in options.length:
    shape = {"auto": "chain"}.get(name, name)
    setup = setup_flags.setup_of(
      options, k=options.most_k, batch=1, shape=shape
    )
    if name in ("auto", "adaptive"):
      calibrated.check(dataclasses.replace(setup, shape="chain"))
    if setup.make_shape().policy is None and name != "auto":
      raise ValueError(
        f"--length={name} decides nothing; give auto, adaptive, or a shape "
        "such as 'entropy(limit=0.4)'"
      )


def lengths(
  options: Options, setup: Setup, target, rows: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Setup]]:
  """Yields the setups of --length, decided for one batch of prompts: chains,
  whatever shape the numbers of --k have."""
  setup = dataclasses.replace(setup, shape="chain")
  arguments = _arguments(options, setup, target, rows)
  for name in options.length:
    if name == "auto":
      k = auto.choose(*arguments).k
      yield f"auto, k = {k}", dataclasses.replace(setup, k=k)
    elif name == "adaptive":
      yield name, auto.adaptive(*arguments)
    else:
      yield name, dataclasses.replace(setup, k=options.most_k, shape=name)


def decide(
  options: Options, setup, target, rows
) -> tuple[Setup, auto.Choice | None]:
  """Returns the setup with the k that pays for one batch of prompts, or with
  the shape that finds it in every round, and prints why."""
  arguments = _arguments(options, setup, target, rows)
  if options.adaptive:
    setup = auto.adaptive(*arguments)
    text = f"k = {setup.k} at most, {setup.shape} (batch {setup.batch})"
    terminal.report(text)
    return setup, None
  choice = auto.choose(*arguments)
  terminal.report(tables.of_choice(choice, setup.batch, options.explain))
  return dataclasses.replace(setup, k=choice.k), choice


def _arguments(options: Options, *given) -> tuple:
  """Returns the arguments of auto.choose and auto.adaptive."""
  batches = options.batch if isinstance(options.batch, tuple) else ()
  return *given, options.most_k, options.calibration, batches
