"""Lets a target write: answers to prompts, or prompts, for a drafter to learn.

  python scripts/write_text.py --write=prompts --target=smollm2-135m-instruct \\
    --count=1000 --temperature=1 --max_new_tokens=64 --batch=128 \\
    --output=runs/invented
  python scripts/write_text.py --write=answers --target=smollm2-135m-instruct \\
    --chat --prompt_file=runs/invented/prompts.jsonl --batch=16 \\
    --max_new_tokens=128 --output=runs/answers
  python scripts/train.py --config=... --folder=runs/drafter \\
    --config.data=runs/answers/answers.jsonl

A draft is used after what its target wrote, so that is what it learns best
from (DistillSpec, arXiv:2310.08461). Autoregressive decoding, at --temperature.

answers: an end token ends an answer. The folder gets answers.jsonl: token_ids
of prompt and answer, how many of them are the prompt's, and the prompt's
number. The same command goes on where it was killed. Prompts that a drafter is
to be measured on must not be among them.

prompts: a model that was tuned on conversations goes on after the head of a
user's message with what a user may say (Magpie, arXiv:2406.08464): prompts of
all the kinds that it has seen, without a file of them. Messages that do not end
within --max_new_tokens, that are shorter than --shortest characters, or that
were there before, are left out. The folder gets prompts.jsonl and
held_out.jsonl.
"""

from tqdm import tqdm

from specdec.benchmark import evaluation
from specdec.benchmark.batches import PROMPT_STEP
from specdec.cli import app, prompt_flags, setup_flags
from specdec.training import prompts, written
from specdec.utils import files, terminal

UNPACKED_ROWS = 32  # from which weights are read better as they are than packed
FLAGS = {
  "answers": ("prompt_file", "chat", "json", "limit", "max_prompt_tokens"),
  "prompts": ("count", "shortest", "every"),
}


def define(flags: app.Flags) -> None:
  flags.enum("write", "answers", list(FLAGS), "What to write.")
  setup_flags.define(flags, without=setup_flags.DRAFTING)
  prompt_flags.define(flags)
  flags.integer("count", 1000, "Messages to draw; fewer are kept.")
  flags.integer("shortest", 12, "Characters that a message must have.")
  flags.integer(
    "every", 20, "Every N-th goes to held_out.jsonl instead; 0: none."
  )


def write_answers(options: app.Options) -> None:
  """Answers the prompts that the folder has no answer of yet."""
  folder = prompt_flags.read(options)
  setup = setup_flags.setup_of(
    options, k=0, drafter="none", prompt_size=evaluation.buffer_size()
  )
  for name in ("write", *FLAGS["prompts"]):  # they define no answer
    del options.parsers[name]
  header = setup_flags.header(options, setup)
  target = setup.load_target(app.note, packed=setup.batch < UNPACKED_ROWS)
  encoded = prompt_flags.corpus(options, target).encoded
  params = setup.decoder(target).params
  prompt_flags.claim(folder, header, params, encoded)
  lines = files.Lines(folder / "answers.jsonl", written.ANSWER)
  for line in lines.broken:
    app.note(f"skipped: {line}; it is answered again")
  written.answer(setup, target, encoded, lines)
  tokens = sum(
    len(line["token_ids"]) - line["prompt_tokens"] for line in lines.entries
  )
  terminal.report(
    f"{len(lines.entries)} answers of {tokens:,} tokens: {folder}"
  )


def write_prompts(options: app.Options) -> None:
  """Draws messages and keeps each once, in order."""
  app.check_at_least(options, 1, "count", "shortest")
  app.check_at_least(options, 0, "every")
  if options.temperature == 0:
    raise ValueError(
      "--temperature=0 would draw one message again and again; give 1"
    )
  folder = app.take_folder("--output", options.output)
  setup = setup_flags.setup_of(
    options, k=0, drafter="none", prompt_size=PROMPT_STEP
  )
  target = setup.load_target(app.note, packed=setup.batch < UNPACKED_ROWS)
  prefix = written.head_of_message(target.checkpoint.tokenizer)
  drawn = written.messages(setup.decoder(target), prefix, options.count)
  drawn = tqdm(drawn, total=options.count, unit="message")
  texts = dict.fromkeys(x for x in drawn if x is not None)
  kept = [x for x in texts if len(x) >= options.shortest]
  if not kept:
    raise ValueError("no message ended; give a larger --max_new_tokens")
  lines = [{"prompt": text, "category": "invented"} for text in kept]
  for path, count in prompts.write_parts(folder, lines, options.every):
    terminal.report(f"{count} prompts: {path}")


def write(options: app.Options) -> None:
  setup_flags.read(options)
  setup_flags.refuse_others(options, "write", FLAGS)
  write = write_answers if options.write == "answers" else write_prompts
  write(options)


main = app.Program(
  __doc__,
  define,
  write,
  interrupted="stopped; --write=answers goes on from here",
)
