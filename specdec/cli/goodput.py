"""Serves prompts that arrive and leave, and reports goodput and latency.

  python scripts/goodput.py                # models in the package: a first look
  python scripts/goodput.py --k=2,4 --batch=1,4,16 --loads=0.5,0.9,inf \\
    --least_new_tokens=16 --json=goodput.json
  python scripts/goodput.py --k=2,4 --length=auto --length=adaptive
  python scripts/goodput.py --prompt_file=P.jsonl --drafter=lookup --k=5 \\
    --temperature=1 --acceptance=rejection --requests=200 --refill=4

A row that is done is given to the next prompt that waits (continuous batching
by slot). The autoregressive baseline and every --k serve the same requests in
turns. A load of 0.5 means that prompts arrive half as fast as the baseline can
answer them, which is measured first, at random times (Poisson); at inf all are
there from the beginning. The table has a line for each batch, load and way:

  tokens/s      goodput: committed tokens a second, prefill included, with one
                standard error over --repeats. Under a load below 1 all ways
                answer what arrives, and latencies differ: x faster answered
  x plain       goodput over the baseline's
  latency       from a prompt's arrival to its last token; p90: of 9 in 10
  first token   from a prompt's arrival to its first token
  occupancy     share of rows that were at work, over rounds
  same text     requests whose text is the baseline's, where it should be

A text is the one that its prompt has anywhere, whatever its slot, neighbours
and time of arrival; with --length=adaptive, of a coupled rule alone.
"""

import dataclasses

from specdec.benchmark import goodput, results
from specdec.benchmark.batches import prompt_size
from specdec.benchmark.queues import Server, requests_of
from specdec.benchmark.runs import BASELINE
from specdec.benchmark.setup import Setup
from specdec.cli import app, auto_flags, prompt_flags, setup_flags
from specdec.report import goodput_tables
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  without = "mesh", "draft_ways", *setup_flags.PROCESSES
  setup_flags.define(flags, without=without)
  auto_flags.define_lengths(flags)
  flags.integer("limit", 0, "Different prompts, 0 for all that there are.")
  flags.integer(
    "context", 64, "Tokens of a prompt at most, without --prompt_file."
  )
  flags.integer("requests", 64, "Prompts that arrive, taken again in turn.")
  flags.list("loads", ["0.5", "0.9", "inf"], "Loads, as above.")
  flags.integer(
    "least_new_tokens",
    None,
    "Requests ask for so many to --max_new_tokens new tokens, drawn evenly; "
    "default --max_new_tokens. An end of text ends one before.",
  )
  flags.integer(
    "refill",
    1,
    "Prompts that are prefilled together; with fewer waiting it costs as much.",
  )
  flags.integer(
    "every", 4, "Rounds between looks at the queue while rows are empty."
  )
  flags.integer("repeats", 3, "How often each load is served in each way.")


def loads_of(options: app.Options) -> list[float]:
  try:
    loads = [float(load) for load in options.loads]
  except ValueError:
    text = ",".join(options.loads)
    raise ValueError(f"--loads={text}; give numbers >= 0.001, or inf") from None
  goodput.check_loads(loads)
  return loads


def checked(options: app.Options) -> list[Setup]:
  """Returns the setups of every batch and k, of flags that can work."""
  setup_flags.read(options)
  auto_flags.check_lengths(options)
  app.check_at_least(options, 0, "limit")
  app.check_at_least(options, 1, "context", "requests", "repeats", "every")
  app.check_at_least(options, 1, "refill", "least_new_tokens")
  if options.prompt_file:
    why = "is for prompts cut from a text, without --prompt_file"
    setup_flags.refuse(options, ["context"], why)
  if options.refill > min(options.batch):
    raise ValueError(
      f"--refill={options.refill} is more than --batch={min(options.batch)}, "
      "the rows there are"
    )
  most, least = options.max_new_tokens, options.least_new_tokens
  loads_of(options)
  requests_of([[0]], options.requests, most, least)
  size = prompt_size([[0]])
  return [
    setup_flags.setup_of(options, batch=batch, k=k, prompt_size=size)
    for batch in options.batch
    for k in options.k or (None,)
  ]


def servers_of(
  options: app.Options, setups: list[Setup], target, prompts: list[list[int]]
) -> dict[str, Server]:
  """Returns the ways of one batch by name, the baseline among them."""
  first = dataclasses.replace(setups[0], prompt_size=prompt_size(prompts))
  named = [(None, dataclasses.replace(first, k=one.k)) for one in setups]
  some = prompts[: first.batch]
  named += auto_flags.lengths(options, first, target, some)
  servers, how = {}, (options.refill, options.every)
  for name, setup in named:
    decoder = setup.decoder(target)
    # A refill holds rows of its own.
    whole = dataclasses.replace(setup, batch=setup.batch + options.refill)
    whole.check_memory(target, decoder, app.note)
    k = decoder.drafter.spec.max_depth if setup.k is None else setup.k
    servers[name or f"k = {k}"] = Server(decoder, *how)
  return servers | {BASELINE: Server(decoder.baseline(), *how)}


def run(options: app.Options) -> None:
  setups, loads = checked(options), loads_of(options)
  header = setup_flags.header(options, setups[-1])
  first = dataclasses.replace(setups[-1], batch=max(options.batch))
  target = first.load_target(app.note)
  prompts = prompt_flags.given_or_held_out(options, target.checkpoint)
  entries = []
  for batch in options.batch:
    sized = [one for one in setups if one.batch == batch]
    servers = servers_of(options, sized, target, prompts)
    given = prompts, loads, options.requests, options.repeats
    more = options.least_new_tokens, options.seed, sized[0].comparable
    with terminal.progress(f"serving with batch {batch}"):
      for some in goodput.compare(servers, *given, *more):
        entries += some
  terminal.report(goodput_tables.listed(entries))
  notes = [x for one in entries for x in one["warnings"]]
  for text in dict.fromkeys([*header["caveats"], *notes]):
    terminal.report(f"  warning: {text}")
  if options.json:
    sizes = [*map(len, prompts)]
    queue = {"prompts": len(prompts), "shortest": min(sizes)}
    queue["longest"] = max(sizes)
    document = {"runs": [], "goodput": entries, "queue": queue}
    results.write_json(options.json, header | document)


main = app.Program(__doc__, define, run)
