"""Measures everything that docs/results shows, one measurement after another.

  python scripts/reproduce.py                   # four hours on two CPU cores
  python scripts/reproduce.py --quick           # minutes: does all of it work?
  python scripts/reproduce.py --list
  python scripts/reproduce.py --only=pair_greedy,rules
  python scripts/report.py --results=results    # then: tables and pictures

Each is a program of scripts/ in a process of its own, whose results come to
results/NAME.json. One that is there already, of the same command, is kept:
after an interruption the same command goes on. One that fails is reported at
the end, and the others are run. Before each one waits until others leave the
cores alone, for at most --patience seconds. Run it at the root of a checkout.
"""

from pathlib import Path

from specdec.benchmark import measurements, provenance, reproduction
from specdec.cli import app
from specdec.utils import remote, terminal


def define(flags: app.Flags) -> None:
  flags.string(
    "output", None, "Folder of the results; default results, or runs/quick."
  )
  flags.bool("quick", False, "Few prompts and repetitions: does it work?")
  flags.bool("list", False, "Only list them: minutes, and commands.")
  flags.list("only", [], "Names of those that are run, even if they are there.")
  flags.bool("again", False, "Repeat what was measured at another commit.")
  flags.string(
    "prompts",
    measurements.FOUR_KINDS,
    "File of prompts by category, as eval.py takes it, instead of ours.",
  )
  flags.integer("patience", 60, "Seconds to wait for a quiet machine.")


def reproduce(options: app.Options) -> None:
  app.check_at_least(options, 0, "patience")
  # Some measurements read what others wrote.
  remote.check_local("--output", options.output or "")
  results = options.output or ("runs/quick" if options.quick else "results")
  plan = reproduction.Plan(
    Path(results),
    Path("runs/reproduce") / ("quick" if options.quick else "whole"),
    options.prompts,
    options.quick,
    options.again,
    frozenset(options.only),
    options.patience,
  )
  if "only" in options.given and not options.only:
    raise ValueError("--only= names nothing; leave it out to run all")
  wanted = [one for one in measurements.MEASUREMENTS if not one.apart]
  if options.only:
    wanted = measurements.named(options.only)
  if options.quick:
    slow = [one.name for one in wanted if one.quick is None]
    if options.only and slow:
      raise ValueError(f"--quick: {', '.join(slow)} cannot be run quickly")
    wanted = [one for one in wanted if one.quick is not None]
  if options.list:
    apart = [one.name for one in measurements.MEASUREMENTS if one.apart]
    terminal.report(f"by --only alone: {', '.join(apart)}")
    for one in wanted:
      terminal.report(f"{one.name} ({one.minutes:g} min)")
      terminal.report(f"  {plan.command(one)}")
      if missing := one.missing():
        terminal.report(f"  skipped: {missing}")
    total = sum(one.minutes for one in wanted)
    terminal.report(f"{len(wanted)} measurements, {total:.0f} min")
    return
  if not Path(options.prompts).is_file():
    raise ValueError(
      f"--prompts={options.prompts}: there is no such file here; run this at "
      "the root of a checkout"
    )
  app.check_folder("--output", results)
  try:
    plan.results.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"--output={results}: {error.strerror}") from error
  if provenance.is_dirty(provenance.commit()):
    app.note("warning: sources are changed, or no checkout: no commit has them")
  failed = reproduction.run(wanted, plan, terminal.report)
  for name, lines in failed.items():
    app.note(f"\n{name} failed:\n{lines}")
  if failed:
    raise ValueError(f"{len(failed)} failed: {', '.join(failed)}")


main = app.Program(__doc__, define, reproduce, interrupted=app.CONTINUES)
