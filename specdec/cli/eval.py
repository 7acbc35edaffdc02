"""Decodes prompts; reports tokens per target step and speedup by category.

  python scripts/eval.py --prompt_file=spec_bench.jsonl --output=runs/eval
  python scripts/eval.py --prompt_file=A.jsonl --prompt_file=B.jsonl --chat \\
    --target=smollm2-135m-instruct --k=1-8 --limit=4 --output=runs/lookup
  python scripts/eval.py --prompt_file=A.jsonl --drafter='early_exit(3)' \\
    --k=1,2,4 --output=runs/early_exit

Lines of a JSONL file are Spec-Bench's or SPEED-Bench's (question_id, category,
turns, of which the first is used) or plain ones (prompt, text or token_ids, and
a category; the file's name stands in for one). Spec-Bench's eight MT-bench
categories count as one, as in its paper (arXiv:2401.07851). SPEED-Bench
(arXiv:2604.09557) is read as Parquet, too, where pyarrow is installed, by its
eleven categories or, the throughput splits, by entropy; rows that are still
placeholders are named and left out. Prompts that the target finds no likelier
than random tokens are warned of. Every prompt is decoded
autoregressively, once, and with each k. The output folder gets lines.jsonl as
prompts finish, then results.json (docs/schema.json), table.txt and plot.png.
The same command again goes on where it was stopped or killed.
"""

import dataclasses

from specdec.benchmark import evaluation
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import plots, tables


def define(flags: app.Flags) -> None:
  setup_flags.define(flags)
  prompt_flags.define(flags)


def evaluate(options: app.Options) -> None:
  setup_flags.read(options)
  setup_flags.single(options, "batch")
  folder = prompt_flags.read(options)
  setup = setup_flags.largest(options, prompt_size=evaluation.buffer_size())
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note)
  corpus = prompt_flags.corpus(options, target)
  size = evaluation.buffer_size(max(map(len, corpus.encoded)))
  setup = dataclasses.replace(setup, prompt_size=size)
  decoder = setup.decoder(target)
  setup.check_memory(target, decoder, app.note)
  lines = prompt_flags.claim(folder, header, decoder.params, corpus.encoded)
  for line in lines.broken:
    app.note(f"skipped: {line}; its prompts are decoded again")
  setups = {k: dataclasses.replace(setup, k=k) for k in options.k or ()}
  setups = setups or {decoder.drafter.spec.max_depth: setup}
  unlikely = evaluation.unlikely(target, corpus.encoded, corpus.groups)
  measured = evaluation.decode(setups, target, corpus, lines)
  runs = evaluation.sum_up(
    measured, corpus.groups, setup.batch, setup.comparable
  )
  header["caveats"] += unlikely
  document = evaluation.document(header, runs, measured, corpus)
  text = tables.by_group(runs)
  if corpus.too_long:
    text += (
      f"\n  {corpus.too_long} prompts of more than "
      f"{options.max_prompt_tokens} tokens were left out"
    )
  if corpus.broken:
    text += f"\n  {len(corpus.broken)} broken lines were skipped"
  text += "".join(f"\n  warning: {x}" for x in document["caveats"])
  title = (
    f"{setup.target}, {setup.description}, {setup.acceptance}, "
    f"temperature {setup.temperature:g}"
  )
  if len(setups) == 1:
    title += f", k = {min(setups)}"
  prompt_flags.publish(
    folder, document, text, title, plots.by_group, options.json
  )


main = app.Program(__doc__, define, evaluate, interrupted=app.CONTINUES)
