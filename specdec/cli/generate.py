"""Completes prompts by speculative decoding and shows where each token is from.

  python scripts/generate.py               # models in the package: a first look
  python scripts/generate.py --drafter='model(stdlib-0.3m)' --temperature=0.8
  python scripts/generate.py --target=DIR --drafter='model(DIR)' --k=4 \\
    --acceptance=rejection
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

from specdec.benchmark import prompts, results, runs
from specdec.benchmark.decoder import batches_of, prompt_size
from specdec.checkpoints import shipped
from specdec.cli import app, auto_flags, setup_flags
from specdec.report import page, tables
from specdec.report.answer import decode_answers
from specdec.utils import files, terminal

_OURS = "speculative"


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  setup_flags.define(flags, auto=True)
  auto_flags.define(flags)
  flags.string("prompt", None, "One prompt.")
  flags.strings("stop", "Text that ends an answer; repeatable.")
  flags.integer(
    "repeats",
    3,
    "Pairs of decodings, autoregressive and speculative, at least: the prompts "
    "are decoded again until there are as many.",
  )
  flags.string(
    "html",
    None,
    "Write a page here, one file for any browser and no network: the text by "
    "origin and round, each token's draft and target probability under the "
    "pointer, and the table.",
  )
  flags.enum(
    "color", "auto", ("auto", "always", "never"), "Colour tokens by origin."
  )


def check(options: app.Options) -> None:
  """Refuses what cannot work, before anything long begins."""
  setup_flags.read(options)
  auto_flags.check(options)
  setup_flags.single(options, "batch")
  app.check_at_least(options, 1, "repeats")
  if options.prompt is not None and options.prompt_file:
    raise ValueError("give --prompt or --prompt_file, not both")
  if "" in options.stop:
    raise ValueError("--stop='' would end every answer; give some text")
  app.check_writable("--html", options.html)


def encode_prompts(options: app.Options, checkpoint) -> list[list[int]]:
  """Token ids of what was asked, or of a first example."""
  tokenizer = checkpoint.tokenizer
  setup_flags.check_chat(options, tokenizer)
  if options.prompt_file:
    wanted = [p for file in options.prompt_file for p in prompts.read(file)]
  elif options.prompt is not None:
    wanted = [prompts.Prompt(text=options.prompt)]
  elif tokenizer is None:
    wanted = [prompts.Prompt(token_ids=tuple(range(16)))]
    app.note("no --prompt and no tokenizer: tokens 0 to 15")
  else:
    text = shipped.PROMPT.read_text()
    wanted = [prompts.Prompt(text=text)]
    app.note(f"no --prompt: completing\n\n{text}")
  size = checkpoint.config.vocab_size
  return prompts.encode(wanted, tokenizer, options.chat, size)


def generate(options: app.Options) -> None:
  """The whole run: check, load, decode both ways, report."""
  check(options)
  setup = setup_flags.largest(options, prompt_size=prompt_size([[0]]))
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note)
  tokenizer = target.checkpoint.tokenizer
  encoded = encode_prompts(options, target.checkpoint)
  batch, choice = min(setup.batch, len(encoded)), None
  if target.places:  # a batch that divides; what is too many stands empty
    groups = target.places.target.ways("rows")
    batch = -(-batch // groups) * groups
  size = prompt_size(encoded)
  longer = size > setup.prompt_size
  setup = dataclasses.replace(setup, batch=batch, prompt_size=size)
  if options.k == ():
    choice = auto_flags.choose(options, setup, target, encoded[:batch])
    terminal.report(tables.of_choice(choice, batch, options.explain))
    setup = dataclasses.replace(setup, k=choice.k)
  decoder = setup.decoder(target)
  setup.check_memory(target, decoder, app.note if longer else None)
  painter = terminal.Painter(options.color, sys.stdout)
  batches = batches_of(encoded, batch)
  decoders = {_OURS: decoder, runs.BASELINE: decoder.baseline()}
  with terminal.progress("compiling (kept for the next run)"):
    compile_seconds = sum(
      one.warm_up(batches[0].rows) for one in decoders.values()
    )
  print(painter.legend())
  for caveat in setup.caveats:
    terminal.report(f"warning: {caveat}")
  print()
  answers, faults = stream(decoder, batches, tokenizer, options.stop, painter)
  comparison = compare(decoders, batches, tokenizer, options)
  summary = comparison.run(_OURS, setup.levels, setup.comparable)
  terminal.report("\n")
  table = [*summary.rows()]
  if choice:
    speedup = f"{choice.speedup:.2f} x, k = {choice.k}"
    table.append(("speedup expected", speedup))
  table += [("compiled in", f"{compile_seconds:.1f} s")]
  caveats = [*header["caveats"], *faults]
  table += [("warning", caveat) for caveat in caveats]
  terminal.report(terminal.table(table))
  if options.json:
    document = header | {
      "caveats": caveats,
      "runs": [summary.document()],
      "compile_seconds": compile_seconds,
      "prompts": [
        {"prompt_token_ids": ids, "token_ids": answer.ids, "text": answer.text}
        for ids, answer in zip(encoded, answers)
      ],
    }
    results.write_json(options.json, document)
  if options.html:
    sections = [
      page.section(*pair, tokenizer) for pair in zip(encoded, answers)
    ]
    text = page.of_setup(setup, summary, sections, table)
    files.replace_text(options.html, text)
    app.note(f"page: {options.html}")


def stream(decoder, batches, tokenizer, stops, painter):
  """Decodes and prints every prompt; returns answers, and faults in words."""
  quiet = sum(len(b.rows) for b in batches) == 1 or not sys.stderr.isatty()
  answers, faults = [], []
  for batch in tqdm(batches, unit="batch", disable=quiet):
    completed, part = decode_answers(
      decoder, batch, tokenizer, stops, None if answers else painter
    )
    faults += completed.faults
    for answer in part:
      if answers:
        print(painter.dim(f"\n--- prompt {len(answers)}"))
        answer.show(painter)
      answers.append(answer)
  if faults and not any(answer.ids for answer in answers):
    raise ValueError(faults[0])
  return answers, faults


def compare(decoders, batches, tokenizer, options) -> runs.Comparison:
  """Times both ways in turns, as far as stop strings say."""

  def way(decoder):
    if not options.stop:
      return lambda batch: decoder.complete(batch, strict=False)
    return lambda batch: decode_answers(
      decoder, batch, tokenizer, options.stop
    )[0]

  repeats = -(-options.repeats // len(batches))
  ways = {name: way(one) for name, one in decoders.items()}
  timed = runs.interleave(ways, batches, repeats)
  total = len(batches) * repeats
  quiet = not sys.stderr.isatty()
  timed = [*tqdm(timed, "timing", total, unit="pair", disable=quiet)]
  return runs.Comparison(decoders, batches, timed)


main = app.Program(__doc__, define, generate)
