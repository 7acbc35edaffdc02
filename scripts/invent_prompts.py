"""Lets a chat model write users' messages: prompts for it to answer.

  python scripts/invent_prompts.py --target=smollm2-135m-instruct \\
    --count=1000 --temperature=1 --max_new_tokens=64 --batch=128 \\
    --output=runs/invented
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=runs/invented/prompts.jsonl ...

A model that was tuned on conversations goes on behind the head of a user's
message with what a user may say (Magpie, arXiv:2406.08464): prompts of all the
kinds that it knows, without a file of them. Messages that do not end within
--max_new_tokens, that are shorter than --shortest characters, or that were
there before, are left out. The folder gets prompts.jsonl and held_out.jsonl.
"""

import itertools
from pathlib import Path

import _decoding
import _flags
import _main
import _output
import _prompt_parts
from absl import flags
from tqdm import tqdm

from specdec import decode
from specdec.benchmark.decoder import PROMPT_STEP, Batch, prompt_size

FLAGS = flags.FLAGS
flags.DEFINE_integer("count", 1000, "Messages to draw; fewer are kept.")
flags.DEFINE_integer("shortest", 12, "Characters that a message must have.")
for _module in (_flags, _output, _prompt_parts):  # or --help leaves them out
  flags.adopt_module_key_flags(_module)
_OWN = ["count", "every", "output", "shortest"]
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def head_of_message(tokenizer) -> list[int]:
  """Token ids of a conversation up to where the user's first message begins.

  Raises:
    ValueError: the model has no tokenizer, or no chat template.
  """
  if tokenizer is None:
    raise ValueError("this model has no tokenizer, so no users either")
  # Two messages that share no first token: what they share is not theirs.
  one, other = (
    tokenizer.chat([{"role": "user", "content": x}]) for x in ("7", "hello")
  )
  pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
  return [token for token, _ in pairs]


def invent(models, prefix: list[int]):
  """Yields the messages that ended in time, in the order of their numbers."""
  batch = _flags.single("batch")
  made = _decoding.decoder_of(
    models,
    decode.NO_DRAFTER,
    decode.NO_DRAFT_RULE,
    batch,
    prompt_size([prefix]),
    models.target.eos_ids,
  )
  with tqdm(total=FLAGS.count, unit="message") as progress:
    for first in range(0, FLAGS.count, batch):
      numbers = range(first, min(first + batch, FLAGS.count))
      found = made.complete(Batch([prefix] * len(numbers), numbers))
      for ids in found.texts:
        if ids and ids[-1] in models.target.eos_ids:
          yield models.target.tokenizer.decode(ids[:-1]).strip()
      progress.update(len(numbers))


def run() -> None:
  """Checks, loads, draws, writes."""
  _flags.settle(_OWN)
  if not FLAGS.output:
    raise ValueError("give --output, a folder")
  for name in ("count", "shortest"):
    if FLAGS[name].value < 1:
      raise ValueError(f"--{name}={FLAGS[name].value}; it must be >= 1")
  if FLAGS.temperature == 0:
    raise ValueError(
      "--temperature=0 would draw one message again and again; give 1"
    )
  _prompt_parts.check_flags()
  models = _decoding.load_baseline(PROMPT_STEP + FLAGS.max_new_tokens)
  prefix = head_of_message(models.target.tokenizer)
  drawn = dict.fromkeys(invent(models, prefix))  # each once, in order
  kept = [text for text in drawn if len(text) >= FLAGS.shortest]
  if not kept:
    raise ValueError("no message ended; give a larger --max_new_tokens")
  _prompt_parts.write(
    Path(FLAGS.output), [{"prompt": x, "category": "invented"} for x in kept]
  )


main = _main.main_of("invent_prompts", run)

if __name__ == "__main__":
  _main.start(main)
