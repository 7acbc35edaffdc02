"""Completes prompts by speculative decoding and shows where each token is from.

  python scripts/generate.py               # models in the package: a first look
  python scripts/generate.py --drafter='model(stdlib-0.3m)' --temperature=0.8
  python scripts/generate.py --target=smollm2-135m-instruct --chat \\
    --prompt='Why is it dark at night?'   # 98 MB once; drafts by prompt lookup
  python scripts/generate.py --prompt_file=prompts.jsonl --batch=4 --json=o.json
  python scripts/generate.py --html=page.html     # each token's story, to keep

Text is printed as it comes, tokens coloured by origin. Then the same prompts
are decoded autoregressively and speculatively in turns, without printing, and a
table sets the two side by side: at least --repeats pairs are timed, each batch
being one, and their spread gives the speedup's standard error.
"""

import dataclasses
import sys

from tqdm import tqdm

from specdec.benchmark import results, runs
from specdec.benchmark.batches import batches_of, prompt_size
from specdec.checkpoints import text_corpus
from specdec.cli import app, auto_flags, prompt_flags, setup_flags, show_flags
from specdec.report.answer import compare_to_stop, stream_answers
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  auto_flags.define(flags)
  flags.string("prompt", None, "One prompt.")
  flags.strings("stop", [], "Text that ends an answer; repeatable.")
  flags.integer(
    "repeats",
    3,
    "Interleaved pairs, speculative and baseline, that are timed at least.",
  )
  flags.string(
    "save_corpus",
    None,
    "Add prompts and answers to this file of texts, or begin it: what "
    "--drafter='suffix(corpus=FILE)' copies from. Of one vocabulary.",
  )
  show_flags.define(flags)


def check(options: app.Options) -> None:
  auto_flags.read(options)
  setup_flags.single(options, "batch")
  if options.k:
    setup_flags.single(options, "k")
  if options.drafter == "none" and any(options.k or ()):
    raise ValueError("--drafter=none drafts nothing; leave --k out")
  app.check_at_least(options, 1, "repeats")
  prompt_flags.check_prompt(options)
  if "" in options.stop:
    raise ValueError("--stop='' would end every answer; give some text")
  show_flags.check(options)
  app.check_writable("--save_corpus", options.save_corpus)


def generate(options: app.Options) -> None:
  check(options)
  setup = setup_flags.largest(options, prompt_size=prompt_size([[0]]))
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note)
  tokenizer = target.checkpoint.tokenizer
  encoded = prompt_flags.encode(options, target.checkpoint)
  vocabulary = target.checkpoint.config.vocab_size, tokenizer
  text_corpus.check(options.save_corpus, *vocabulary)
  batch, choice = min(setup.batch, len(encoded)), None
  if target.places:  # rows that are too many stand empty
    batch = target.places.target.divisible(batch)
  size, planned = prompt_size(encoded), setup.prompt_size
  setup = dataclasses.replace(setup, batch=batch, prompt_size=size)
  if options.k == ():
    first = encoded[:batch]
    setup, choice = auto_flags.decide(options, setup, target, first)
  decoder = setup.decoder(target)
  setup.check_memory(target, decoder, app.note, size > planned)
  streaming = show_flags.streaming(options, tokenizer)
  batches = batches_of(encoded, batch)
  decoders = {runs.OURS: decoder, runs.BASELINE: decoder.baseline()}
  with terminal.progress("compiling (kept for the next run)"):
    compile_seconds = sum(
      one.warm_up(batches[0].rows) for one in decoders.values()
    )
  painter = streaming["painter"]
  print(painter.legend())
  for caveat in setup.caveats:
    terminal.report(f"warning: {caveat}")
  print()
  quiet = len(encoded) == 1 or not sys.stderr.isatty()
  shown = tqdm(batches, unit="batch", disable=quiet)
  beginnings = prompt_flags.beginnings(options, target.checkpoint)
  answers, faults = stream_answers(
    decoder, shown, tokenizer, options.stop, beginnings, **streaming
  )
  if options.save_corpus:
    texts = [[*ids, *answer.ids] for ids, answer in zip(encoded, answers)]
    count = text_corpus.add(options.save_corpus, texts, *vocabulary)
    app.note(f"{count} texts in {options.save_corpus}")
  comparison = compare_to_stop(
    decoders, batches, tokenizer, options.stop, options.repeats, quiet
  )
  if options.profile:
    runs.trace(options.profile, decoders, batches[0])
  summary = comparison.run(runs.OURS, setup.k, setup.comparable)
  terminal.report("\n")
  table = [*summary.rows()]
  if choice:
    table.append(
      ("speedup expected", f"{choice.speedup:.2f} x, k = {choice.k}")
    )
  table += [("compiled in", f"{compile_seconds:.1f} s")]
  caveats = [*header["caveats"], *faults]
  table += [("warning", caveat) for caveat in caveats]
  terminal.report(terminal.table(table))
  for line in prompt_flags.remarks(options, target.checkpoint, encoded):
    terminal.report(f"\n{line}")
  if options.json:
    document = header | {
      "caveats": caveats,
      "runs": [summary.document()],
      "compile_seconds": compile_seconds,
      "prompts": [
        {"prompt_token_ids": ids, "token_ids": one.ids, "text": one.text}
        for ids, one in zip(encoded, answers)
      ],
    }
    results.write_json(options.json, document)
  show_flags.write(options, setup, summary, encoded, answers, tokenizer, table)


main = app.Program(__doc__, define, generate)
