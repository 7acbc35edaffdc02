"""Times passes and decoding, and how near they come to this machine's roof.

  python scripts/bench.py                            # the shipped pair, k = 3
  python scripts/bench.py --k=1-8 --batch=1,4 --temperature=1 \\
    --acceptance=rejection
  python scripts/bench.py --nodecode --passes=1-16 --batch=1,2,4   # T(n) alone
  python scripts/bench.py --target=preset:llama3-1b --random_weights \\
    --acceptance='synthetic(0.8)' --k=1-8           # speed, and no checkpoint

A pass of n tokens is timed for each n of --passes: T(n), in turns with reading
as many bytes as the weights have. Then the same prompts are decoded, in turns
autoregressively and with each k, after warming up; no token ends a text. They
are cut to --context tokens, and those of --prompt_file that have fewer are left
out; without it they are the package's 32 held-out functions, or random tokens
where the target has no tokenizer. A time that the bandwidth forbids is marked.
The last line is one JSON document.
"""

import dataclasses
import json

import jax

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

_DECODED = "limit", "length", "profile"  # flags of decoding alone


def define(flags: app.Flags) -> None:
  flags = flags.without(["compilation_cache"])  # it is timed
  auto_flags.define(flags, lengths=True)
  flags.integers("passes", "1,2,4,8,16", "Tokens of passes timed alone: T(n).")
  flags.integers(
    "slots",
    None,
    "Slots of the KV cache of passes alone, several to compare; default "
    "--context + --max_new_tokens + n.",
  )
  flags.bool("decode", True, "Decode, too; --nodecode for passes alone.")
  flags.integer("context", 128, "Tokens of every prompt.")
  flags.bool(
    "prefill", True, "Run prompts; --noprefill: begin behind empty KV."
  )
  flags.integer("limit", 0, "Prompts that are decoded, 0 for all of them.")
  repeats = "Timings of everything, after warming up; of decoding, at least."
  flags.integer("repeats", 9, repeats)
  flags.string(
    "profile",
    None,
    "Folder for a trace of one decoding each way, for XProf or TensorBoard: "
    "pip install xprof, then tensorboard --logdir=FOLDER.",
  )
  flags.string(
    "calibrate",
    None,
    "Instead of all that: fit the cost model to passes and rounds of these "
    "models, and keep the fits in this file, which keeps what it holds.",
  )


def check(options: app.Options) -> None:
  auto_flags.read(options)
  app.check_at_least(options, 0, "limit")
  app.check_at_least(options, 1, "repeats", "context", "passes")
  app.check_at_least(options, options.context + max(options.passes), "slots")
  if options.slots and options.decode:
    raise ValueError("--slots is for passes alone; give --nodecode")
  if not options.decode:
    names = (*setup_flags.DECODING, *_DECODED, "prompt_file")
    setup_flags.refuse(options, names, "has no effect with --nodecode")
  if not options.prefill and not options.random_weights:
    raise ValueError("--noprefill is for --random_weights")
  if options.chat and not options.prompt_file:
    raise ValueError("--chat is for --prompt_file")
  if options.calibrate:
    app.check_writable("--calibrate", options.calibrate)
    names = "passes", "decode", "json", "prefill", *_DECODED
    setup_flags.refuse(options, names, "has no effect with --calibrate")
    if options.k == ():
      raise ValueError("--calibrate needs numbers for --k")
    calibrated.check(setup_flags.largest(options))


def measure(options: app.Options, setup, target, source) -> dict:
  batches, setups = {}, {}
  for batch in options.batch:
    where = source, batch, options.context, options.limit
    batches[batch] = rows.make_batches(*where)
    sized = dataclasses.replace(setup, batch=batch)
    ks = (options.k or (None,)) if options.decode else ()
    setups[batch] = [(None, dataclasses.replace(sized, k=k)) for k in ks]
    given = options, sized, target, batches[batch].batches[0].rows
    if options.decode and options.k == ():
      setups[batch] = [(None, auto_flags.decide(*given)[0])]
    setups[batch] += auto_flags.lengths(*given)
  how = options.repeats, options.profile, options.slots, options.prefill
  passes = options.passes
  return points.measure_all(setup, target, batches, passes, setups, *how)


def bench(options: app.Options) -> None:
  check(options)
  jax.config.update("jax_enable_compilation_cache", False)
  setup = setup_flags.largest(options, prompt_size=options.context)
  if options.slots:  # for the memory plan
    new = max(options.slots) - options.context
    setup = dataclasses.replace(setup, max_new_tokens=new)
  header = setup_flags.header(options, setup)
  machine = hardware.local(progress=app.note)
  target = setup.load_target(app.note, num_tokens=max(options.passes))
  checkpoint = target.checkpoint
  setup_flags.check_chat(options, checkpoint.tokenizer)
  texts = options.prompt_file, options.chat, options.seed
  source = rows.Source(checkpoint, *texts)
  if options.calibrate:
    fitted = setup, target, source, options.repeats, app.note
    calibration = calibrated.calibrate_file(options.calibrate, *fitted)
    return terminal.report(tables.of_calibration(calibration))
  setup.check_memory(target, setup.decoder(target), app.note)
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
    raise ValueError(gross[0])


main = app.Program(__doc__, define, bench)
