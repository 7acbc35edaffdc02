"""Compares drafters of one target: what each is worth, and why.

  python scripts/compare_drafters.py --output=runs/drafters \\
    --prompt_file=specdec/shipped/prompts.jsonl
  python scripts/compare_drafters.py --output=runs/drafters \\
    --prompt_file=P.jsonl --drafters='model(stdlib-1m); mine.py:bigram'

Every drafter decodes the same prompts by the same rule (--acceptance), greedily
and at temperature 1, in chains of every --k and in one tree of --tree_size
draft tokens that is the same for all, each in turns with the autoregressive
baseline; no token ends a text. What a drafter cannot draw is left out. The
columns of the tables:

  weights            held beyond the target's
  MB a further draft token
                     moved by one more token of a chain
  at position        share of rounds that accepted draft token 1, 2 ..., given
                     that those before it were; with the longest chain
  tokens per target step
                     with each k, and in the tree
  speedup            over the baseline: measured / predicted by bytes. A draft
                     step takes what it moves at the rate of a one-token pass of
                     the target, a verification what a pass of so many tokens
                     took. The rest is what small operations cost beyond their
                     bytes. "-": the drafter does not say what it reads
  best               the fastest chain, with one standard error, its tokens per
                     second, and those of the baseline

The output folder gets lines.jsonl as points finish, then results.json
(docs/schema.json), table.txt and plot.png. The same command resumes a run that
was killed, and with more --drafters adds to it.
"""

import dataclasses

import numpy as np

from specdec.benchmark import comparison, drafter_comparison, evaluation
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import drafter_tables, plots
from specdec.training import saving
from specdec.utils import calls

_WITHOUT = (
  *setup_flags.DRAFTING, *setup_flags.PROCESSES, "temperature", "top_k",
  "top_p", "mesh", "random_weights", "json",
)  # fmt: skip
_SHIPPED = "lookup; model(stdlib-1m); early_exit(1); layer_skip(shipped)"


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_WITHOUT)
  prompt_flags.define(flags)
  flags.string(
    "drafters",
    None,
    "Calls with ; between them, each as --drafter of other programs. Default, "
    f"for {shipped.TARGET}: {_SHIPPED}; quantized; every head in the package.",
  )
  flags.string("acceptance", "rejection", "A call, as in other programs.")
  flags.integers("k", "1-8", "Draft tokens of the chains.")
  flags.integer("tree_size", 8, "Draft tokens of the tree, 0 for none.")


def setups_of(options: app.Options) -> list[Setup]:
  """Returns each drafter's setup, with a chain of the smallest k."""
  app.check_at_least(options, 1, "k")
  app.check_at_least(options, 0, "tree_size")
  setup_flags.single(options, "batch")
  names = options.drafters
  if names is None:
    if options.target != shipped.TARGET:
      raise ValueError(f"--target={options.target}: give its --drafters")
    heads = [f"head({name})" for name in shipped.drafters(shipped.TARGET)]
    names = "; ".join([_SHIPPED, "quantized", *heads])
  base = setup_flags.setup_of(
    options,
    k=min(options.k),
    drafter="none",
    prompt_size=evaluation.buffer_size(),
  )
  for temperature in drafter_comparison.TEMPERATURES:
    dataclasses.replace(base, temperature=temperature)
  setups = [
    dataclasses.replace(base, drafter=name.strip())
    for name in calls.split(names, ";")
    if name.strip()
  ]
  if not setups:
    raise ValueError("--drafters names none")
  for setup in setups:
    if "k" in setup.drafter_calls[-1].kwargs:
      raise ValueError(f"{setup.drafter}: how much it drafts is --k")
  return setups


def compare(options: app.Options) -> None:
  setup_flags.read(options, drafter="none")
  folder, setups = prompt_flags.read(options), setups_of(options)
  header = setup_flags.header(options, setups[0], setups)
  target = setups[0].load_target(app.note, others=setups)
  encoded = prompt_flags.corpus(options, target).encoded
  batch = min(setups[0].batch, len(encoded))
  size = evaluation.buffer_size(max(map(len, encoded)))
  setups = [
    dataclasses.replace(setup, batch=batch, prompt_size=size)
    for setup in setups
  ]
  decoders = {setup.drafter: setup.decoder(target) for setup in setups}
  points = drafter_comparison.points_of(
    setups, target, options.k, options.tree_size
  )
  weights = {
    name: saving.checksum(decoder.params.draft)
    for name, decoder in decoders.items()
  }
  points = drafter_comparison.keyed(points, weights)
  added = "drafters", "file_checksums"  # more may come; points have their own
  settings = {n: x for n, x in header["settings"].items() if n not in added}
  params, config = target.checkpoint.params, target.checkpoint.config
  free = header | {"settings": settings}
  lines = prompt_flags.claim(folder, free, params, encoded)
  bench = comparison.Bench(target, encoded)
  measured = comparison.resume(lines, points, bench.measure, "point")
  context = int(np.mean([len(ids) for ids in encoded]))
  nodes = {line["run"]["nodes"] for line in measured}
  passes = comparison.time_passes(setups[0], target, lines, nodes, context)
  machine = drafter_comparison.Machine(config, passes, batch, context)
  runs = [
    drafter_comparison.document(point, line, decoders[name], machine)
    for ((name, *_), point), line in zip(points.items(), measured)
  ]
  text = drafter_tables.of_drafters(runs)
  text += f"\n\n  a one-token pass reads {machine.read_rate / 1e9:.1f} GB/s"
  text += "".join(f"\n  warning: {caveat}" for caveat in header["caveats"])
  document = header | {
    "runs": runs,
    "pass_seconds": sorted(passes.items()),
    "read_rate": machine.read_rate,
  }
  title = f"Drafters of {options.target}"
  prompt_flags.publish(folder, document, text, title, plots.over_drafters)


main = app.Program(__doc__, define, compare, interrupted=app.CONTINUES)
