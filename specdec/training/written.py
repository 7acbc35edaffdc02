"""What a target writes for a drafter to learn from: answers, and prompts."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from specdec.benchmark.batches import Batch, prompt_size
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.checkpoints import Tokenizer
from specdec.utils import files, terminal

# What a line of answers has, for files.Lines.
ANSWER = {"prompt": int, "prompt_tokens": int, "token_ids": list}


def answer(
  setup: Setup,
  target: Target,
  encoded: Sequence[Sequence[int]],
  lines: files.Lines,
) -> None:
  """Answers the prompts, token ids, that `lines` does not hold yet."""
  done = {line["prompt"] for line in lines.entries}
  left = [i for i in range(len(encoded)) if i not in done]
  left.sort(key=lambda i: len(encoded[i]))  # batches of like lengths
  firsts = range(0, len(left), setup.batch)
  batches = [left[first : first + setup.batch] for first in firsts]
  # What a run that is stopped has answered is of all lengths.
  random.Random(setup.seed).shuffle(batches)
  decoders: dict[int, Decoder] = {}
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


def head_of_message(tokenizer: Tokenizer | None) -> list[int]:
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


def messages(
  decoder: Decoder, prefix: list[int], count: int
) -> Iterator[str | None]:
  """Yields `count` texts after a prefix; None for one that did not end."""
  for first in range(0, count, decoder.batch):
    numbers = range(first, min(first + decoder.batch, count))
    completed = decoder.complete(Batch([prefix] * len(numbers), numbers))
    for ids in completed.texts:
      ended = ids and ids[-1] in decoder.eos_ids
      yield decoder.tokenizer.decode(ids[:-1]).strip() if ended else None
