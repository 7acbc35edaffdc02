"""Times passes and decoding, and how near they come to this machine's roof.

  python scripts/bench.py                            # the shipped pair, k = 3
  python scripts/bench.py --k=1-8 --batch=1,4 --temperature=1 \\
    --acceptance=rejection
  python scripts/bench.py --target=smollm2-135m-instruct \\
    --drafter='early_exit(20)' --k=2
  python scripts/bench.py --nodecode --passes=1-16 --batch=1,2,4   # T(n) alone
  python scripts/bench.py --target=preset:llama3-1b --random_weights \\
    --acceptance='synthetic(0.8)' --k=1-8           # speed, and no checkpoint

A pass of n tokens is timed for each n of --passes: T(n). Then the same prompts
are decoded autoregressively and speculatively in turns, each program compiled
and run once before the clock starts; no token ends a text. Prompts are cut to
--context tokens; without --prompt_file they are the 32 held-out Python
functions that come with the package, or random tokens where the target has no
tokenizer; --limit=4 takes fewer of them. This machine's bandwidth is measured
before and after, by reading as many bytes as the weights have; a time that it
forbids is marked in the table. The last line is one JSON document.
"""

import dataclasses
import json
import sys

import jax
from tqdm import tqdm

from specdec.benchmark import (
  calibrated,
  points,
  provenance,
  results,
  rows,
  timing,
)
from specdec.cli import app, auto_flags, setup_flags
from specdec.report import tables
from specdec.roofline import hardware
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  setup_flags.define(flags, auto=True)
  auto_flags.define(flags)
  flags.integers(
    "passes", "1,2,4,8,16", "Tokens of the passes timed alone: T(n)."
  )
  flags.bool("decode", True, "Decode, too; --nodecode for passes alone.")
  flags.integer("context", 128, "Tokens of every prompt.")
  flags.integer("limit", 0, "Prompts that are decoded, 0 for all of them.")
  flags.integer(
    "repeats",
    9,
    "Timings of everything, after warming up; of decoding pairs, at least: the "
    "prompts are decoded again until there are as many.",
  )
  flags.string(
    "profile",
    None,
    "Folder for a trace of one decoding each way, for XProf or TensorBoard: "
    "pip install xprof, then tensorboard --logdir=FOLDER.",
  )
  flags.string(
    "calibrate",
    None,
    "Instead of all that: time passes and rounds of these models, fit the cost "
    "model to them, and keep the fits in this file, beside what it holds.",
  )


def check(options: app.Options) -> None:
  """Refuses what cannot work, before anything long begins."""
  setup_flags.read(options)
  auto_flags.check(options)
  app.check_at_least(options, 0, "limit")
  app.check_at_least(options, 1, "repeats", "context", "passes")
  if not options.decode:
    names = ("k", "limit", "profile", "prompt_file")
    setup_flags.refuse(options, names, "has no effect with --nodecode")
  if options.calibrate:
    app.check_writable("--calibrate", options.calibrate)
    names = ("passes", "decode", "limit", "profile", "json")
    setup_flags.refuse(options, names, "has no effect with --calibrate")
    if options.k == ():
      raise ValueError("--calibrate needs numbers, not --k=auto")
    calibrated.check(setup_flags.largest(options))


def calibrate(options: app.Options, setup, target, source) -> None:
  """Writes --calibrate, and says how well the cost model explains the times."""
  most_k = max(setup.levels, 1)
  ks = sorted({k for k in (2, 5, most_k) if k <= most_k or not setup.has_heads})
  batches = sorted({1, (setup.batch + 1) // 2, setup.batch})
  prompts = rows.make_rows(source, max(batches), options.context)
  calibration = calibrated.timed(
    setup,
    target,
    prompts,
    batches,
    ks,
    options.context + setup.max_new_tokens + max(ks),
    calibrated.read(options.calibrate),
    options.repeats,
    report=app.note,
  )
  calibrated.write(options.calibrate, calibration)
  terminal.report(tables.of_calibration(calibration))


def measure(options: app.Options, setup, target, source) -> dict:
  """Times every pass and every point."""
  context, limit, repeats = options.context, options.limit, options.repeats
  batches = {
    batch: rows.make_batches(source, batch, context, limit)
    for batch in options.batch
  }
  passes, entries = [], []
  total = len(options.batch) * len(options.passes)
  for some in batches.values() if options.decode else ():
    count = len(some.batches)
    total += len(options.k or [0]) * count * -(-repeats // count)
  with tqdm(total=total, disable=not sys.stderr.isatty()) as progress:
    for batch, prompts in batches.items():
      setup = dataclasses.replace(setup, batch=batch)
      for n in options.passes:
        progress.set_postfix_str(f"batch {batch}, a pass of {n}")
        passes.append(points.time_pass(setup, target, n, context, repeats))
        progress.update()
      ks, baseline = options.k if options.decode else [], None
      if ks == ():
        first = prompts.batches[0].rows
        choice = auto_flags.choose(options, setup, target, first)
        text = tables.of_choice(choice, batch, options.explain)
        progress.write(terminal.escape(text))
        ks = (choice.k,)
      for k in [setup.levels] if ks is None else ks:
        progress.set_postfix_str(f"batch {batch}, k = {k}")
        entry, baseline = points.measure(
          dataclasses.replace(setup, k=k),
          target,
          prompts,
          repeats,
          baseline,
          options.profile,
          progress.update,
        )
        entries.append(entry)
  return {"runs": entries, "passes": passes}


def bench(options: app.Options) -> None:
  """The whole run."""
  options.compilation_cache = ""  # compilation is timed
  check(options)
  jax.config.update("jax_enable_compilation_cache", False)
  setup = setup_flags.largest(options, prompt_size=options.context)
  header = setup_flags.header(options, setup)
  machine = hardware.local(progress=app.note)
  target = setup.load_target(app.note)
  checkpoint = target.checkpoint
  setup_flags.check_chat(options, checkpoint.tokenizer)
  source = rows.Source(
    checkpoint, options.prompt_file, options.chat, options.seed
  )
  if options.calibrate:
    return calibrate(options, setup, target, source)
  before = timing.bandwidth_of(checkpoint.params)
  document = header | measure(options, setup, target, source)
  document |= {
    "bandwidth": max(before, timing.bandwidth_of(checkpoint.params)),
    "hardware": dataclasses.asdict(machine),
    "peak_memory": timing.peak_memory(),
    "load_after": provenance.load(),
  }
  gross = points.check_times(document, setup, target, machine)
  terminal.report(tables.of_machine(document))
  terminal.report(tables.of_document(document, setup))
  if options.json:
    results.write_json(options.json, document)
  terminal.report(json.dumps(document, allow_nan=False))
  if gross:
    raise timing.Impossible(gross[0])


main = app.Program(__doc__, define, bench, mendable=(timing.Impossible,))
