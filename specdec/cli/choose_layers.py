"""Searches the sublayers that a layer-skipping draft should leave out.

  python scripts/choose_layers.py --output=runs/skip       # the shipped target
  python scripts/generate.py --drafter='layer_skip(runs/skip/skip.json)'
  python scripts/choose_layers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=P.jsonl --k=2,4,6 --trials=200 --output=runs/smollm2
  python scripts/choose_layers.py --objective=predicted --for_chip=v5e ...

Draft & Verify (arXiv:2309.08168): the target drafts for itself with some of its
attentions and MLPs left out. Bayesian optimisation looks for those with the
most tokens per second, in --trials subsets. The first ones tried are simple:
--first, nothing, every second layer, every second attention or MLP,
all attentions. With several --k the length of the drafts is looked for as well;
with --exit_threshold drafts stop at unlikely tokens and --k is the most.

  measured   (default) tokens of the texts / seconds of the decoding rounds, the
             median of --timings, on this machine. Each subset is a program of
             its own, which takes seconds to compile.
  predicted  draft tokens are counted by decoding, a round's time comes from the
             cost model: for a chip that is not here, and without noise.

The texts are --samples prompts of --context tokens, --batch at a time. Measure
the subset that was chosen on other prompts (eval.py).

The output folder gets trials.journal as trials finish, then skip.json: the best
subset, timed once more in turns with the autoregressive baseline, and all
trials. The same command resumes a run that was killed; more --trials add to it.
"""

from specdec.benchmark import deployments, results, rows, skip_search
from specdec.benchmark.setup import Setup
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import drafter_tables
from specdec.roofline import chips, hardware
from specdec.utils import calls, remote, terminal

_WITHOUT = ("drafter", "shape", "draft_ways", *setup_flags.PROCESSES)
_FREE = (*setup_flags.FREE, "trials")  # may change when a run is resumed


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_WITHOUT)
  flags.string("output", None, "Folder of the results.")
  flags.integer("context", 128, "Tokens of every prompt.")
  flags.integer("trials", 60, "Subsets tried, those of earlier runs included.")
  flags.integer("samples", 4, "Prompts that are decoded.")
  flags.integer("timings", 3, "Of a subset, after it ran once.")
  flags.float(
    "exit_threshold",
    None,
    "Stop drafting at a token less likely than this, by the draft; it adapts "
    "from there, row by row. The paper's: 0.8 greedy, 0.5 to sample.",
  )
  flags.string(
    "first",
    "layer_skip()",
    "Subset to try first: layer_skip(attention=[1,3], mlp=[2]), or "
    "layer_skip(FILE) of an earlier run.",
  )
  flags.enum(
    "objective", "measured", ("measured", "predicted"), "Tokens per second."
  )
  names = ", ".join(chips.CHIPS)
  flags.string(
    "for_chip",
    None,
    f"With --objective=predicted: one of {names}; default this machine.",
  )


def setup_of(options: app.Options) -> Setup:
  """Returns the setup of the longest drafts, of flags that can work."""
  app.check_at_least(options, 1, "trials", "samples", "timings", "context", "k")
  setup_flags.single(options, "batch")
  if options.objective == "measured":
    why = "is for --objective=predicted"
    setup_flags.refuse(options, ("for_chip",), why)
  if options.for_chip:
    chips.get(options.for_chip)
  if options.chat and not options.prompt_file:
    raise ValueError("--chat wraps prompts of --prompt_file; give one")
  call = calls.parse(options.first)
  if call.name != "layer_skip" or "threshold" in call.kwargs:
    raise ValueError(
      f"--first={options.first}; give layer_skip(...) without a threshold, "
      "which is --exit_threshold"
    )
  skip = deployments.skip_of(call)
  drafter = skip_search.drafter_of(skip, options.exit_threshold)
  size = options.context
  return setup_flags.largest(options, drafter=drafter, prompt_size=size)


def choose_layers(options: app.Options) -> None:
  setup_flags.read(options, drafter="layer_skip()")
  # The search's journal is locked, and appended to.
  remote.check_local("--output", options.output or "")
  folder = app.take_folder("--output", options.output)
  setup = setup_of(options)
  skip_search.library()
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note)
  setup.check_memory(target, setup.decoder(target))
  setup_flags.check_chat(options, target.checkpoint.tokenizer)
  source = rows.Source(
    target.checkpoint, options.prompt_file, options.chat, options.seed
  )
  prompts = rows.make_rows(source, options.samples, options.context)
  prompt_flags.claim(folder, header, target.checkpoint.params, prompts, _FREE)
  chip = chips.get(options.for_chip) if options.for_chip else None
  if options.objective == "predicted" and chip is None:
    chip = chips.of_hardware(hardware.local(progress=app.note))
  bench = skip_search.SkipBench(
    setup, target, prompts, options.exit_threshold, options.timings, chip
  )
  ks, layers = options.k or (setup.levels,), bench.num_layers
  first = deployments.skip_of(setup.drafter_calls[0])
  study = skip_search.open_study(folder, layers, ks, options.seed, first)
  skip_search.search(study, bench, ks, options.trials)
  trials = skip_search.documents(study, layers)
  best = max(trials, key=lambda trial: trial["tokens_per_second"])
  terminal.report(drafter_tables.of_subsets(trials))
  app.note("\ntiming the best once more ...")
  skip = skip_search.subset(study.best_params, layers)
  ours, baseline = bench.against_baseline(skip, best["k"])
  measured = {
    "exit_threshold": options.exit_threshold,
    "objective": options.objective,
    "measured_tokens_per_second": ours,
    "baseline_tokens_per_second": baseline,
    "speedup": ours / baseline,
    "trials": trials,
  }
  document = header | best | measured
  for path in (str(folder / "skip.json"), options.json):
    if path:
      results.write_json(path, document)
  terminal.report(
    f"\nin turns: {ours:.1f} tokens/s, baseline {baseline:.1f}: "
    f"{ours / baseline:.2f} x"
    f"\nuse it: --drafter='layer_skip({folder / 'skip.json'})'"
  )
  for caveat in document["caveats"]:
    terminal.report(f"warning: {caveat}")


main = app.Program(__doc__, define, choose_layers, interrupted=app.CONTINUES)
