r"""Hands a target, a drafter and a way of decoding over to an inference engine.

  python scripts/export.py --drafter=lookup --k=4 --engine=vllm --output=DIR
  python scripts/export.py --target=OWNER/NAME --target_as=OWNER/NAME \
    --drafter='eagle3(runs/e/best.safetensors)' --k=4 --engine=all --output=DIR
  python scripts/export.py --drafter='model(stdlib-1m)' --k=4 --temperature=1 \
    --acceptance=block --engine=vllm --chip=v6e --measured=bench.json \
    --output=DIR

Writes target/ and drafter/ as the engine reads them, its options as JSON or
YAML, and handover.json; prints the command line that serves them, and warns of
what the engine does otherwise. What it refuses is refused before anything is
written. With --chip the best k of every batch size is worked out by the cost
model, and written where the engine takes a schedule.
"""

import sys
from pathlib import Path

from specdec.benchmark import handover, schedules
from specdec.benchmark.serving import ENGINES
from specdec.benchmark.setup import Setup
from specdec.cli import app, roofline_flags, setup_flags
from specdec.cli.app import Options
from specdec.utils import remote
from specdec.utils.terminal import report

ALL = "all"
_NOT_OF_FILES = (
  "top_k", "top_p", "max_new_tokens", "weights", "random_weights", "seed",
  "batch", "dtype", "prompt_file", "chat", "json", "compilation_cache", "mesh",
  "draft_ways", "kv", "num_nodes", *setup_flags.PROCESSES,
)  # fmt: skip
_ACCEPTANCE = "measured", "prefix_acceptance", "alpha"


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_NOT_OF_FILES)
  flags.enum("engine", "vllm", [*ENGINES, ALL], "Who serves it; all that can.")
  flags.string("output", None, "Folder to write; must be new or empty.")
  flags.string(
    "target_as", None, "Name by which the engine finds the target: no target/."
  )
  dtypes = "bfloat16", "float32", "float16"
  flags.enum("dtype", "bfloat16", dtypes, "Of the written weights.")
  flags.string("chip", None, "Work out a schedule for this chip (roofline.py).")
  flags.string(
    "measured",
    None,
    "With --chip: JSON of bench.py or eval.py whose run with most draft tokens "
    "says how often they are accepted.",
  )
  flags.list(
    "prefix_acceptance",
    [],
    "Instead: share of rounds that accept draft tokens 1, 1 to 2, ...",
  )
  flags.float("alpha", None, "Instead: share accepted, at every position.")
  flags.integer(
    "ways", 1, "With --chip: chips that share the target's weights."
  )
  flags.integer("context", 2048, "With --chip: cached positions of a row.")
  flags.integer("largest_batch", 256, "With --chip: where the schedule ends.")


def check(options: Options) -> tuple[Setup, Path]:
  """Returns what is handed over and where; refuses what cannot work."""
  setup_flags.apply_config(options)
  if options.k is None:
    raise ValueError("give --k, the draft tokens of a step")
  setup = setup_flags.setup_of(options, batch=1)
  if not options.output:
    raise ValueError("give --output, a new folder")
  remote.check_local("--output", options.output)
  output = app.new_folder("--output", options.output)
  if options.chip is None:
    priced = *_ACCEPTANCE, "ways", "context", "largest_batch"
    setup_flags.refuse(options, priced, "is for --chip")
  elif len({*_ACCEPTANCE} & options.given) != 1:
    raise ValueError(
      "--chip needs one of --measured, --prefix_acceptance and --alpha: how "
      "often draft tokens are accepted"
    )
  app.check_at_least(options, 1, "ways", "context", "largest_batch")
  return setup, output


def prices_of(options: Options, setup: Setup) -> schedules.Prices | None:
  """Returns what a schedule is worked out from; None: no --chip."""
  if options.chip is None:
    return None
  acceptance = options.alpha
  if options.measured:
    acceptance = schedules.measured(options.measured, setup.drafter)
  elif options.prefix_acceptance:
    texts = options.prefix_acceptance
    acceptance = roofline_flags.numbers("prefix_acceptance", texts)
  chip = roofline_flags.chip_of(options.chip)
  sizes = options.ways, options.context, acceptance, options.largest_batch
  return schedules.Prices(chip, *sizes)


def export(options: Options) -> None:
  setup, output = check(options)
  handed = handover.describe(setup)
  prices, schedule = prices_of(options, setup), None
  if prices is not None:
    weights = "float32" if options.dtype == "float32" else "bfloat16"
    schedule = prices.schedule(setup, weights)
  engines = [*ENGINES] if options.engine == ALL else [options.engine]
  asked = setup, handed, engines, output, options.target_as
  handed_over = handover.ask(*asked, schedule)
  arguments = output, setup, handed, handed_over, options.dtype
  handover.write(*arguments, options.target_as, prices)
  for engine, served in handed_over.served.items():
    report(f"{engine}, keys of {ENGINES[engine].keys}:")
    report(served.shell)
    for warning in served.warnings:
      report(f"warning: {warning}")
  for engine, sentence in handed_over.refused.items():
    report(f"{engine} refuses: {sentence}")
  report(f"{output}: {handover.NAME} says all of it", file=sys.stderr)


main = app.Program(__doc__, define, export)
