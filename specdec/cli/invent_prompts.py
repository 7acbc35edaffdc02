"""Lets a chat model write users' messages: prompts for it to answer.

  python scripts/invent_prompts.py --target=smollm2-135m-instruct \\
    --count=1000 --temperature=1 --max_new_tokens=64 --batch=128 \\
    --output=runs/invented
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=runs/invented/prompts.jsonl ...

A model that was tuned on conversations goes on behind the head of a user's
message with what a user may say (Magpie, arXiv:2406.08464): prompts of all the
kinds that it has seen, without a file of them. Messages that do not end within
--max_new_tokens, that are shorter than --shortest characters, or that were
there before, are left out. The folder gets prompts.jsonl and held_out.jsonl.
"""

import itertools

from tqdm import tqdm

from specdec.benchmark.decoder import PROMPT_STEP, Batch, Decoder
from specdec.cli import app, setup_flags
from specdec.cli.write_answers import UNPACKED_ROWS
from specdec.training import prompts
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  left_out = (*setup_flags.DRAFTING, "prompt_file", "chat", "json")
  setup_flags.define(flags, without=left_out)
  flags.integer("count", 1000, "Messages to draw; fewer are kept.")
  flags.integer("shortest", 12, "Characters that a message must have.")
  flags.integer(
    "every", 20, "Every N-th goes to held_out.jsonl instead; 0: none."
  )
  flags.string("output", None, "Folder of the prompts.")


def head_of_message(tokenizer) -> list[int]:
  """Token ids of a conversation up to where the user's first message begins.

  Raises:
    ValueError: the model has no tokenizer, or no chat template.
  """
  if tokenizer is None:
    raise ValueError(
      "--target has no tokenizer; take a model with a chat template"
    )
  # Two messages that share no first token: what they share is not theirs.
  one, other = (
    tokenizer.chat([{"role": "user", "content": x}]) for x in ("7", "hello")
  )
  pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
  return [token for token, _ in pairs]


def invent(decoder: Decoder, prefix: list[int], count: int):
  """Yields the messages that ended in time, in the order of their numbers."""
  with tqdm(total=count, unit="message") as progress:
    for first in range(0, count, decoder.batch):
      numbers = range(first, min(first + decoder.batch, count))
      completed = decoder.complete(Batch([prefix] * len(numbers), numbers))
      for ids in completed.texts:
        if ids and ids[-1] in decoder.eos_ids:
          yield decoder.tokenizer.decode(ids[:-1]).strip()
      progress.update(len(numbers))


def invent_prompts(options: app.Options) -> None:
  """Checks, loads, draws, writes."""
  setup_flags.read(options)
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
  packed = setup.batch < UNPACKED_ROWS
  target = setup.load_target(app.note, packed=packed)
  prefix = head_of_message(target.checkpoint.tokenizer)
  drawn = invent(setup.decoder(target), prefix, options.count)
  # Each once, in order.
  kept = [x for x in dict.fromkeys(drawn) if len(x) >= options.shortest]
  if not kept:
    raise ValueError("no message ended; give a larger --max_new_tokens")
  lines = [{"prompt": text, "category": "invented"} for text in kept]
  for path, count in prompts.write_parts(folder, lines, options.every).items():
    terminal.report(f"{count} prompts: {path}")


main = app.Program(__doc__, define, invent_prompts)
