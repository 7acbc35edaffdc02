"""Compares speculation here with other engines on this machine, in turns.

  pip install llama-cpp-python                 # optional, as are torch and
  pip install torch transformers               # transformers
  python scripts/compare_engines.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=P.jsonl --json=engines.json
  python scripts/compare_engines.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=P.jsonl --drafters='quantized; lookup' --k=4,8 \\
    --peers=llama.cpp-Q8_0 --repeats=5

Every prompt is decoded greedily, by itself (batch 1), by autoregressive
decoding in float32, with each of --drafters, and by those of --peers that are
installed: llama.cpp with all matrices in F32 or in Q8_0 (from the target's GGUF
file, which is converted once into the cache folder), transformers in float32.
All get the same token ids, write as many new tokens as the autoregressive text
has, and have a thread for each core; prefill is outside the clock, as is what
is done once. Who goes first changes from prompt to prompt and from repeat to
repeat. The columns of the table:

  one a prompt   new tokens per second, with one standard error by the spread of
                 the --repeats
  mean           geometric mean over prompts
  x baseline     geometric mean of quotients by autoregressive decoding here
  same text      texts that are those of autoregressive decoding here
  T(8) / T(1)    a pass of eight tokens, with logits at each, over one of one;
                 after the first prompt

A busy machine slows engines down in different ways: one that waits for all its
threads after each product loses most. Look at the load in the results.
"""

import dataclasses
import itertools

from specdec.benchmark import engines, peers, results, runs
from specdec.benchmark.batches import prompt_size
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import source_of
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import tables
from specdec.roofline import hardware
from specdec.utils import calls, terminal
from specdec.utils.spelling import check_choice

_WITHOUT = (
  *setup_flags.DRAFTING, *setup_flags.PROCESSES, "temperature", "top_k",
  "top_p", "batch", "dtype", "weights", "mesh", "random_weights", "seed",
)  # fmt: skip


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=_WITHOUT)
  prompt_flags.define(flags.without(["output"]))
  flags.string(
    "drafters",
    "quantized; lookup(min_ngram=2)",
    "Calls with ; between them, each as --drafter of other programs.",
  )
  flags.integers(
    "k", None, "Draft tokens a round, for every drafter; default each its own."
  )
  flags.list(
    "peers",
    [*peers.PEERS],
    f"Other engines, of {', '.join(peers.PEERS)}; those that are not installed "
    "are left out. '' for none.",
  )
  flags.integer("repeats", 3, "How often all prompts are decoded.")


def setups_of(options: app.Options) -> dict[str, Setup]:
  """Returns the setup of every drafter and k by its name in the table."""
  names = [name.strip() for name in calls.split(options.drafters, ";")]
  setups = [
    setup_flags.setup_of(options, drafter=name, k=k)
    for name, k in itertools.product(filter(None, names), options.k or (None,))
  ]
  if not setups:
    raise ValueError("--drafters names none")
  return {f"{setup.drafter}, k = {setup.levels}": setup for setup in setups}


def read(options: app.Options) -> dict[str, Setup]:
  """Checks the flags before anything is loaded; returns the setups."""
  options.batch = (1,)
  setup_flags.read(options, drafter="none")
  app.check_at_least(options, 0, "limit", "max_prompt_tokens")
  app.check_at_least(options, 1, "repeats", "k")
  if not options.prompt_file:
    raise ValueError("give --prompt_file")
  for name in options.peers:
    check_choice("--peers:", name, peers.PEERS)
  return setups_of(options)


def compare(options: app.Options) -> None:
  setups = read(options)
  first = next(iter(setups.values()))
  header = setup_flags.header(options, first)
  target = first.load_target(app.note, others=[*setups.values()])
  corpus = prompt_flags.corpus(options, target)
  decoders: dict[str, Decoder] = {}
  for name, setup in setups.items():
    size = prompt_size(corpus.encoded)
    setup = dataclasses.replace(setup, prompt_size=size)
    decoders[name] = setup.decoder(target)
    setup.check_memory(target, decoders[name], app.note)
  decoders = {runs.BASELINE: decoders[name].baseline()} | decoders
  slots = decoders[name].max_length + max(engines.PASSES)
  source = source_of(options.target)
  with terminal.progress("loading other engines"):
    loaded = peers.load(options.peers, source, slots, hardware.cpu_cores())
  header["versions"] |= loaded.versions
  header["caveats"] += loaded.left_out
  with terminal.progress("decoding"):
    comparison, measured = engines.measure(
      decoders, loaded.engines, corpus.encoded, options.repeats
    )
  document = engines.document(header, comparison, measured, corpus)
  terminal.report(tables.of_engines(document))
  if options.json:
    results.write_json(options.json, document)


main = app.Program(__doc__, define, compare)
