"""Runs a list of settings, each predicted and measured.

  python scripts/sweep.py --sweep=configs/sweeps/shipped.py --output=runs/sweep
  python scripts/report.py runs/sweep             # the page

A sweep file's get_config() has `points`, a list of settings (those of
generate.py that are a Setup's: drafter, acceptance, k, batch, temperature ...,
and prompt_file and chat), `common`, settings of all of them, `calibrate`, the
batches and ks of the rounds that the cost model is fitted to and the length of
their texts (max_new_tokens, default half the points'), which no point should
repeat, and `whole`, values for --context, --texts, --pairs and
--calibration_repeats where these are not given.

Every setting is calibrated once (runs/sweep/calibration.json): passes and
rounds are timed and the cost model is fitted to them. Then for every point the
texts are decoded without a clock, to see how draft tokens fare (above
temperature 0 with other noise), and timed, autoregressively and speculatively
in turns. From the calibration and the first count comes the prediction. A line
of lines.jsonl is added as each point finishes. Killed, the same command goes on
and repeats nothing; a point that fails is written down, and the others are
measured (--retry tries it again). TensorBoard shows curves over k as they grow
(tensorboard --logdir=runs/sweep/tensorboard; k is the step).

A line: point (its settings), run (as docs/schema.json says), rounds (of all
that was timed), prediction, observed (what was counted without a clock),
context (slots of cache), load, date, file_checksums (of files that settings
name: a point whose drafter was edited is measured anew); or point and error.
"""

import contextlib
import json

from specdec.benchmark import provenance, sweep_run
from specdec.benchmark.sweep_run import Lengths, Rounds, SweepBench
from specdec.cli import app, setup_flags
from specdec.report import sweep_scalars, tables
from specdec.utils import files, run_folder, terminal


def define(flags: app.Flags) -> None:
  flags.config(
    "sweep", "Python file whose get_config() lists the points.", "sweeps/*.py"
  )
  flags.string("output", None, "Folder of the results.")
  usual = Lengths()
  flags.integer("context", usual.context, "Tokens of every prompt.")
  flags.integer(
    "texts", usual.texts, "Prompts, at least as many as a batch has."
  )
  flags.integer(
    "pairs",
    usual.pairs,
    "Batches that are timed in both ways, at least: the texts are decoded "
    "again, above temperature 0 with other noise, until there are as many.",
  )
  flags.integer(
    "calibration_repeats",
    usual.calibration_repeats,
    "Timings of a calibration.",
  )
  flags.bool("retry", False, "Try points again that failed before.")
  flags.bool(
    "repredict",
    False,
    "Predict again what is measured already, by the fits in calibration.json; "
    "without that file the machine is calibrated anew.",
  )
  flags.string(
    "shard",
    None,
    "I/N: every N-th point from the I-th on, so that N machines share a sweep, "
    "each with an --output of its own; report.py takes all of them.",
  )
  setup_flags.define_cache(flags)
  setup_flags.define_mesh(flags)


def shard_of(points: list, shard: str | None) -> list:
  if shard is None:
    return points
  part, _, parts = shard.partition("/")
  numbers = part.isdecimal() and parts.isdecimal()
  if not numbers or not int(part) < int(parts):
    raise ValueError(f"--shard={shard}; it must be I/N with 0 <= I < N")
  return points[int(part) :: int(parts)]


def lengths_of(options: app.Options, sweep: dict) -> Lengths:
  """Returns --context, --texts ..., or what the sweep says of them."""
  app.check_at_least(options, 1, *Lengths._fields)
  flags = {n: getattr(options, n) for n in Lengths._fields}
  given = {n: x for n, x in flags.items() if n in options.given}
  return Lengths(
    **flags | sweep_run.numbers_of(sweep, "whole", Lengths) | given
  )


def sweep(options: app.Options) -> None:
  if not options.sweep:
    raise ValueError("give --sweep=configs/sweeps/NAME.py, the list of points")
  setup_flags.refuse(options, ["draft_ways"], "is a setting of the points")
  config = options.sweep.to_dict()
  lengths = lengths_of(options, config)
  rounds = Rounds(**sweep_run.numbers_of(config, "calibrate", Rounds))
  setup_flags.join(options)
  place = {"mesh": options.mesh, "prompt_size": lengths.context}
  points = shard_of(sweep_run.points_of(config, **place), options.shard)
  folder = app.take_folder("--output", options.output)
  for point in points:  # all of them, before anything long begins
    sweep_run.check(point, rounds, lengths)
  setup_flags.use_cache(options.compilation_cache)
  whole = lengths._asdict() | {"calibrate": rounds._asdict()}
  whole |= {"shard": options.shard, "mesh": options.mesh}
  run_folder.claim(folder, whole, free=("calibration_repeats",))
  lines = files.Lines(folder / "lines.jsonl")
  for broken in lines.broken:
    app.note(f"skipped: {broken}")
  if not (folder / "header.json").exists():
    settings = {"output": options.output, **lengths._asdict()}
    header = json.dumps(provenance.header(settings, []))
    files.replace_text(folder / "header.json", header + "\n")
  bench = SweepBench(folder / "calibration.json", points, rounds, lengths)
  again = options.retry, options.repredict
  curves = sweep_scalars.Curves(folder / "tensorboard", lines.entries)
  with contextlib.closing(curves):
    measured = sweep_run.measure_all(bench, points, lines, *again, curves.add)
  terminal.report(tables.of_sweep(measured))
  failed = len(points) - len(measured)
  if failed:
    raise ValueError(
      f"{failed} of {len(points)} points failed; {folder}/lines.jsonl says why"
    )


main = app.Program(__doc__, define, sweep, interrupted=app.CONTINUES)
