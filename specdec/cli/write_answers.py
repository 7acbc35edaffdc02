"""Lets a target answer prompts: text of its own for a drafter to learn from.

  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=prompts.jsonl --batch=16 --max_new_tokens=128 \\
    --output=runs/answers
  python scripts/train_drafter.py --config=... --folder=runs/drafter \\
    --config.data=runs/answers/answers.jsonl

A draft is used behind what its target wrote, so that is what it learns best
from (DistillSpec, arXiv:2310.08461). Autoregressive decoding, at --temperature;
an end token ends an answer. The output folder gets answers.jsonl: token_ids of
prompt and answer, how many of them are the prompt's, and the prompt's number.
The same command goes on where it was killed. Prompts that a drafter is to be
measured on must not be among them.
"""

import dataclasses
import random

from tqdm import tqdm

from specdec.benchmark import evaluation
from specdec.benchmark.decoder import Batch, prompt_size
from specdec.cli import app, prompt_flags, setup_flags
from specdec.utils import files, terminal

UNPACKED_ROWS = 32  # from which weights are read better as they are than packed


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  setup_flags.define(flags, without=setup_flags.DRAFTING)
  prompt_flags.define(flags)


def answer(setup, target, encoded, lines) -> None:
  """Answers whatever `lines` does not hold yet."""
  done = {line["prompt"] for line in lines.entries}
  left = [i for i in range(len(encoded)) if i not in done]
  left.sort(key=lambda i: len(encoded[i]))  # batches of like lengths
  firsts = range(0, len(left), setup.batch)
  batches = [left[first : first + setup.batch] for first in firsts]
  # What a run that is stopped has answered is of all lengths.
  random.Random(setup.seed).shuffle(batches)
  decoders = {}
  with tqdm(total=len(encoded), initial=len(done), unit="answer") as progress:
    for members in batches:
      rows = [encoded[i] for i in members]
      size = prompt_size(rows)
      if size not in decoders:
        sized = dataclasses.replace(setup, prompt_size=size)
        decoders[size] = sized.decoder(target)
        with terminal.progress(f"compiling prompts of at most {size} tokens"):
          decoders[size].compile()
      completed = decoders[size].complete(Batch(rows, members))
      for i, prompt, text in zip(members, rows, completed.texts):
        lines.append(
          {
            "prompt": i,
            "prompt_tokens": len(prompt),
            "token_ids": [*prompt, *text],
          }
        )
      progress.update(len(members))


def write_answers(options: app.Options) -> None:
  """The whole run: check, load, answer."""
  setup_flags.read(options)
  folder = prompt_flags.read(options)
  setup = setup_flags.setup_of(
    options, k=0, drafter="none", prompt_size=evaluation.buffer_size()
  )
  header = setup_flags.header(options, setup)
  packed = setup.batch < UNPACKED_ROWS
  target = setup.load_target(app.note, packed=packed)
  encoded = prompt_flags.corpus(options, target).encoded
  params = setup.decoder(target).params
  prompt_flags.claim(folder, header, params, encoded)
  lines = files.Lines(folder / "answers.jsonl")
  for line in lines.broken:
    app.note(f"skipped: {line}; it is answered again")
  answer(setup, target, encoded, lines)
  tokens = sum(
    len(line["token_ids"]) - line["prompt_tokens"] for line in lines.entries
  )
  terminal.report(
    f"{len(lines.entries)} answers of {tokens:,} tokens: {folder}"
  )


main = app.Program(__doc__, define, write_answers, interrupted=app.CONTINUES)
