"""Asks the same prompts again, edited: what a corpus of first answers gains.

  python scripts/repeat_work.py --prompt_file=P.jsonl --output=runs/repeated
  python scripts/repeat_work.py --prompt_file=P.jsonl --chat --limit=5 --k=8 \\
    --target=smollm2-135m-instruct --edit=' Be brief.' --output=runs/repeated

Every prompt is answered autoregressively; prompts and answers become a corpus,
corpus.npz in the output folder, which --drafter='suffix(corpus=FILE)' takes.
Then --edit is put after each prompt, and it is decoded again with prompt
lookup, with suffix decoding, and with suffix decoding over that corpus, each in
turns with the autoregressive baseline. `all` of these prompts is a row of the
table for each drafter.

The folder gets answers.jsonl, corpus.npz, edited.jsonl (the prompts that are
decoded), lines of batches, then results.json (docs/schema.json), table.txt and
plot.png. The same command goes on where it was stopped.
"""

import dataclasses
import json

from specdec.benchmark import evaluation, prompts
from specdec.checkpoints import text_corpus
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import plots, tables
from specdec.training import written
from specdec.utils import files, remote

EDIT = "\nThank you."  # it asks for the same, and changes every answer's head


def define(flags: app.Flags) -> None:
  setup_flags.define(flags, without=("drafter", "shape", "draft_ways", "mesh"))
  prompt_flags.define(flags)
  flags.string("edit", EDIT, "Text put behind a prompt that is asked again.")


def check_texts(options: app.Options) -> None:
  """Refuses prompts that nothing can be put after."""
  for path in options.prompt_file:
    for prompt in prompts.scan(path)[0]:
      if prompt.text is None:
        raise ValueError(f"{prompt.name} holds token ids, which have no text")


def repeat(options: app.Options) -> None:
  setup_flags.read(options, drafter="none")
  setup_flags.single(options, "batch")
  remote.check_local("--output", options.output or "")  # it is read again
  folder = prompt_flags.read(options)
  check_texts(options)
  k = setup_flags.single(options, "k")
  size = evaluation.buffer_size()
  setup = setup_flags.setup_of(options, drafter="suffix", prompt_size=size)
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note)
  checkpoint = target.checkpoint
  first = prompt_flags.corpus(options, target)
  params = setup.decoder(target).params
  prompt_flags.claim(folder, header, params, first.encoded)
  answers = files.Lines(folder / "answers.jsonl", written.ANSWER)
  plain = dataclasses.replace(setup, drafter="none", k=0)
  written.answer(plain, target, first.encoded, answers)
  place = folder / "corpus.npz"
  vocabulary = checkpoint.config.vocab_size, checkpoint.tokenizer
  texts = [line["token_ids"] for line in answers.entries]
  text_corpus.add(place, texts, *vocabulary)

  lines = (
    {"prompt": prompt.text + options.edit, "category": prompt.category}
    for prompt in first.prompts
  )
  text = "".join(json.dumps(line) + "\n" for line in lines)
  files.replace_text(folder / "edited.jsonl", text)
  options.prompt_file = [str(folder / "edited.jsonl")]
  options.limit = options.max_prompt_tokens = 0  # all that were answered
  again = prompt_flags.corpus(options, target)
  names = {
    "lookup": "lookup(min_ngram=2)",
    "suffix": "suffix",
    "suffix and corpus": f"suffix(corpus={str(place)!r})",
  }
  runs, measured = [], []
  for number, (name, call) in enumerate(names.items()):
    one = dataclasses.replace(setup, drafter=call, k=k or setup.levels)
    kept = files.Lines(folder / f"lines_{number}.jsonl")
    batches = evaluation.decode({one.levels: one}, target, again, kept)
    *_, run = evaluation.sum_up(
      batches, again.groups, setup.batch, setup.comparable
    )
    runs.append(dataclasses.replace(run, group=name))
    measured += batches
  document = evaluation.document(header, runs, measured, again)
  table = tables.by_group(runs)
  table += "".join(f"\n  warning: {x}" for x in document["caveats"])
  title = f"{setup.target}, asked again, k = {setup.levels}"
  prompt_flags.publish(
    folder, document, table, title, plots.by_group, options.json
  )


main = app.Program(__doc__, define, repeat, interrupted=app.CONTINUES)
