"""Searches the likeliest texts with a drafter, beside plain beam search.

  python scripts/beam_search.py            # models in the package: a first look
  python scripts/beam_search.py --widths=1,2,4,8 --prompt_file=P.jsonl \\
    --drafter='model(stdlib-1m)' --shape='dynamic(12)' --repeats=3 --json=o.json
  python scripts/beam_search.py --target=smollm2-135m-instruct --chat \\
    --drafter=quantized --shape='dynamic(8)' --length_penalty=0.6

The best beam of every prompt is printed for the first of --widths; then each
width is searched with the drafter and without it, in turns. Beams and scores
are those of plain beam search, whatever drafts, to the rounding of float32; a
step is accepted where all beams that it keeps were drafted. The table says how
many steps a pass of the target made, and the speedup with its standard error,
over batches, or over repeats of a single batch:

  steps/round  steps of plain beam search for each round of the drafter's
  speedup      of all rounds, prefill excluded
  same beams   batches whose texts are the same, of all

--shape decides how wide drafts are; chains serve width 1, and trees the others.
"""

import dataclasses
import math

from specdec import beam
from specdec.benchmark import beams, results
from specdec.benchmark.batches import batches_of, prompt_size
from specdec.benchmark.setup import Setup
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import tables
from specdec.utils import terminal

_NO_USE = ("temperature", "top_k", "top_p", "acceptance")
_STOPPING = {"no": False, "yes": True, "never": "never"}


def define(flags: app.Flags) -> None:
  without = (*_NO_USE, "mesh", "draft_ways", *setup_flags.PROCESSES)
  setup_flags.define(flags, without=without)
  flags.string("prompt", None, "One prompt.")
  flags.integer("limit", 0, "Prompts of --prompt_file, 0 for all of them.")
  flags.integers("widths", "1,2,4,8", "Beams of a prompt.")
  flags.float(
    "length_penalty",
    1.0,
    "Exponent of the length by which a finished beam's score is divided.",
  )
  flags.enum(
    "early_stopping",
    "no",
    tuple(_STOPPING),
    "yes: a prompt ends with as many finished beams as are kept; no: when no "
    "running one would be better if it ended now; never: when none can become "
    "better.",
  )
  flags.integer("repeats", 3, "Interleaved pairs that are timed.")


def checked(options: app.Options) -> Setup:
  """Returns the setup of flags that can work."""
  setup_flags.read(options)
  app.check_at_least(options, 1, "widths", "repeats")
  app.check_at_least(options, 0, "limit")
  if not math.isfinite(options.length_penalty):
    raise ValueError(
      f"--length_penalty={options.length_penalty}; it must be finite"
    )
  prompt_flags.check_prompt(options)
  if not options.prompt_file:
    setup_flags.refuse(options, ["limit"], "is for --prompt_file")
  return setup_flags.setup_of(options, prompt_size=prompt_size([[0]]))


def run(options: app.Options) -> None:
  setup = checked(options)
  header = setup_flags.header(options, setup)
  most = dataclasses.replace(setup, batch=setup.batch * max(options.widths))
  target = most.load_target(app.note)
  encoded = prompt_flags.encode(options, target.checkpoint, options.limit)
  batch = min(setup.batch, len(encoded))
  size = prompt_size(encoded)
  setup = dataclasses.replace(setup, batch=batch, prompt_size=size)
  most = dataclasses.replace(setup, batch=batch * max(options.widths))
  most.check_memory(target, most.decoder(target), app.note, again=True)
  decoder = setup.decoder(target)
  early = _STOPPING[options.early_stopping]
  searches = [
    beam.Search(width, options.length_penalty, early)
    for width in options.widths
  ]
  batches = batches_of(encoded, batch)
  first = [beams.search(decoder, one, searches[0]) for one in batches]
  tokenizer = target.checkpoint.tokenizer
  best = [
    (texts[0], float(scores[0]))
    for one in first
    for texts, scores in zip(one.texts, one.scores)
  ]
  for ids, score in best:
    text = str(ids) if tokenizer is None else tokenizer.decode(ids)
    terminal.report(f"{score:.4f} {text}\n")
  entries = [*beams.compare(decoder, batches, searches, options.repeats)]
  terminal.report(tables.of_beams(entries))
  if options.json:
    texts = [{"token_ids": ids, "score": score} for ids, score in best]
    document = header | {"beam_searches": entries, "texts": texts}
    results.write_json(options.json, document)


main = app.Program(__doc__, define, run)
