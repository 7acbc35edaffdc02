"""Predicts what speculation gains, from datasheets or a calibrated machine.

  python scripts/roofline.py                        # Llama 3 70B + 1B on v5p:4
  python scripts/roofline.py --chip=h100 --target=llama3-8b --ways=1 \\
    --drafter='model(llama3-1b)' --alpha=0.8 --output=runs/roofline
  python scripts/roofline.py --chip=v6e --ways=8 --target=llama3-70b \\
    --weights=int8 --context=32768 --prefix_acceptance=0.8,0.66,0.55,0.47
  python scripts/roofline.py --chip=v5e --ways=1 --target=stdlib-11m \\
    --drafter='lookup(k=4) | eagle(eagle)'
  python scripts/roofline.py --calibration=calibration.json \\
    --target=stdlib-11m --drafter='model(stdlib-1m)' --alpha=0.85
  python scripts/roofline.py --chips=all --ways=8  # side by side
  python scripts/roofline.py --papers         # the founding papers' tables
  python scripts/roofline.py --chip=v6e --ways=1 --target=llama3-8b \\
    --batches=1,4,16,64 --alpha=0.8 --lengths=8  # fixed k, auto, adaptive, ..

Prints what a round costs term by term, the best k for every batch and context,
where speculation stops paying, the gain at equal memory, and schedules for
engines; --json keeps it, with command and versions. With --output it writes
pictures (speedup over k and batch, k and context, k and draft size, k and
acceptance; chips side by side; the roofline) and cells.csv. With --lengths it
also decodes table models by draft lengths that are fixed or decided, and prices
their rounds.
"""

import sys

from specdec.benchmark import priced_lengths, provenance, results
from specdec.benchmark.scenario import Scenario
from specdec.cli import app, roofline_flags, setup_flags
from specdec.cli.app import Options
from specdec.report import length_tables, papers, roofline, roofline_plots
from specdec.utils.terminal import progress, report


def predict(options: Options) -> None:
  setup_flags.apply_config(options)
  roofline_flags.check(options)
  app.check_writable("--json", options.json)
  if options.papers:
    _publish(options, [papers.tables()], {})
    return
  workload = roofline_flags.workload(options)
  scenario = roofline_flags.scenario(options)
  others = roofline_flags.other_chips(options)
  drafts = options.drafts if roofline_flags.compares_drafts(scenario) else []
  acceptance = roofline_flags.draft_acceptance(options)
  pair = scenario.pair
  pair.check_memory(1, options.context)
  folder = options.output and app.take_folder("--output", options.output)
  if scenario.calibration is not None:
    setting = scenario.setting or "none, for it has no such rounds"
    report(f"overhead of rounds by the calibration: {setting}", sys.stderr)
  tables = [
    roofline.memory(scenario, options.context),
    roofline.rounds(pair, workload),
    roofline.plans(pair, workload),
  ]
  if others:
    tables.append(roofline.by_chip(scenario, workload, others))
  if drafts:
    compared = scenario, workload, drafts, acceptance
    tables.append(roofline.best_draft(*compared))
  if options.rank_acceptance:
    rates = roofline_flags.numbers("rank_acceptance", options.rank_acceptance)
    tables.append(roofline.best_tree(pair, workload, rates))
  lengths = _lengths(options, scenario)
  if lengths:
    tables.append(length_tables.priced(lengths))
  _publish(options, tables, {"lengths": lengths} if lengths else {})
  if folder:
    roofline_plots.write_cells(folder / "cells.csv", scenario, workload)
    roofline_plots.draw(folder, scenario, workload, others, drafts, acceptance)
    report(f"pictures and cells.csv: {folder}", sys.stderr)


def _lengths(options: Options, scenario: Scenario) -> list[dict]:
  """Returns what --lengths asks for, or nothing."""
  if not options.lengths:
    return []
  most, repeats = options.most, options.lengths
  given = options.batches, options.context, options.alpha, most, repeats
  scenario.pair.check_memory(max(options.batches), options.context)
  with progress("decoding table models"):
    return [*priced_lengths.compare(scenario.pair, *given)]


def _publish(options: Options, tables: list[str], more: dict) -> None:
  """Prints tables; with --json also keeps them, and what else there is."""
  for table in tables:
    report(table)
  if options.json:
    settings = {
      name: getattr(options, name)
      for name in sorted(options.given - {"config"})
      if "." not in name  # entries of the config, which are among the flags
    }
    header = provenance.header(settings, [])
    results.write_json(options.json, header | {"tables": tables} | more)


main = app.Program(__doc__, roofline_flags.define, predict)
