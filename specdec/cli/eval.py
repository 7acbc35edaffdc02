"""Decodes files of prompts and reports by category: tokens a pass, speedup.

  python scripts/eval.py --prompt_file=spec_bench.jsonl --output=runs/eval
  python scripts/eval.py --prompt_file=A.jsonl --prompt_file=B.jsonl --chat \\
    --target=smollm2-135m-instruct --k=1-8 --limit=4 --output=runs/lookup
  python scripts/eval.py --prompt_file=A.jsonl --drafter='early_exit(3)' \\
    --k=1,2,4 --output=runs/early_exit

Lines of a JSONL file are Spec-Bench's (question_id, category, turns, of which
the first is used) or plain ones (prompt, text or token_ids, and a category; the
file's name stands in for one). Spec-Bench's eight MT-bench categories count as
one, as in its paper (arXiv:2401.07851). Every prompt is decoded
autoregressively, once, and with each k. The output folder gets lines.jsonl as
prompts finish, then results.json (docs/schema.json), table.txt and plot.png.
The same command again goes on where it was stopped or killed.
"""

import dataclasses

from tqdm import tqdm

from specdec.benchmark import evaluation, provenance, results
from specdec.benchmark.decoder import Batch
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import canvas, plots, tables
from specdec.utils import files, terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  setup_flags.define(flags)
  prompt_flags.define(flags)


def decode(setups, target, corpus, lines) -> list[dict]:
  """Decodes whatever `lines` does not hold yet; a line for every batch.

  Args:
    setups: by k.
  """
  encoded, [setup, *_] = corpus.encoded, setups.values()
  batches = evaluation.plan(encoded, corpus.groups, setup.batch)
  done = {tuple(line["prompts"]): line for line in lines.entries}
  decoders, baseline, compiled_size = {}, None, None
  with tqdm(total=len(encoded) * len(setups), unit="text") as progress:
    for turn, (size, members) in enumerate(batches):
      if tuple(members) not in done:
        rows = [encoded[i] for i in members]
        if size != compiled_size:
          decoders, baseline, compiled_size = {}, None, size
          for k, one in setups.items():
            what = f"compiling k = {k} for prompts up to {size} tokens"
            with terminal.progress(what):
              one = dataclasses.replace(one, prompt_size=size)
              decoders[k] = one.decoder(target)
              baseline = baseline or decoders[k].baseline()
              for decoder in (decoders[k], baseline):
                if not decoder.is_warm:
                  decoder.warm_up(rows)
        group = corpus.groups[members[0]]
        progress.set_postfix_str(terminal.escape(group, ""))
        line = evaluation.decode_batch(
          decoders, baseline, Batch(rows, members), turn, setup.comparable
        )
        line |= {"date": provenance.now(), "load": provenance.load()}
        lines.append(line)
        done[tuple(members)] = line
      progress.update(len(members) * len(setups))
  return [done[tuple(members)] for _, members in batches]


def evaluate(options: app.Options) -> None:
  """The whole run: check, load, decode, report."""
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
  prompt_flags.claim(folder, header, decoder.params, corpus.encoded)
  lines = files.Lines(folder / "lines.jsonl")
  for line in lines.broken:
    app.note(f"skipped: {line}; its prompts are decoded again")
  setups = {k: dataclasses.replace(setup, k=k) for k in options.k or ()}
  setups = setups or {decoder.drafter.spec.max_depth: setup}
  measured = decode(setups, target, corpus, lines)
  runs = evaluation.sum_up(
    measured, corpus.groups, setup.batch, setup.comparable
  )
  document = header | evaluation.document(header, runs, measured, corpus)
  text = tables.by_group(runs)
  if corpus.too_long:
    text += (
      f"\n  {corpus.too_long} prompts of more than "
      f"{options.max_prompt_tokens} tokens were left out"
    )
  if corpus.broken:
    text += f"\n  {len(corpus.broken)} broken lines were skipped"
  for caveat in document["caveats"]:
    text += f"\n  warning: {caveat}"
  terminal.report(text)
  files.replace_text(folder / "table.txt", text + "\n")
  for path in (str(folder / "results.json"), options.json):
    if path:
      results.write_json(path, document)
  title = (
    f"{setup.target}, {setup.description}, {setup.acceptance}, "
    f"temperature {setup.temperature:g}"
    + (f", k = {min(setups)}" if len(setups) == 1 else "")
  )
  figure = plots.by_group(document["runs"], title, document["caveats"])
  canvas.save(figure, folder / "plot.png")
  app.note(f"results: {folder}/results.json, table.txt, plot.png")


main = app.Program(__doc__, define, evaluate, interrupted=app.CONTINUES)
