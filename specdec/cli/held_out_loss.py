"""Held-out loss of models, and of a smoothed 3-gram that they must beat.

  python scripts/held_out_loss.py --model=stdlib-11m --model=stdlib-1m \\
    --data=corpus/train --held_out=corpus/held_out

In nats a token and in bits a byte. Models see the text in pieces of --sequence
tokens; the 3-gram, counted on --data with the first model's tokens, sees all of
it at once.
"""

import math

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.cli import app
from specdec.training import data, evaluate, ngram
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.strings("model", "Named like --target of generate.py; repeatable.")
  flags.string("data", None, "Text that the 3-gram counts; default: no 3-gram.")
  flags.string("held_out", None, "Text to evaluate on.")
  flags.integer("sequence", 256, "Tokens that a model sees.")


def compare(options: app.Options) -> None:
  """Prints a line for each model, and one for the 3-gram."""
  if not (options.model and options.held_out):
    raise ValueError("give --model and --held_out")
  app.check_at_least(options, 1, "sequence")
  texts = data.read_texts(options.held_out)
  num_bytes = sum(len(text.encode()) for text in texts)
  documents = data.read(options.held_out)
  rows, tokenizer = [], None
  for name in options.model:
    model = checkpoints.load(fetch(name))
    tokenizer = tokenizer or model.tokenizer
    ids = data.tokenize(documents, model.tokenizer)
    packed = data.Packed(ids, options.sequence)
    loss = evaluate.held_out_loss(model, packed.evenly_spaced(packed.count))
    rows.append((name, describe(loss, len(ids), num_bytes)))
  if options.data:
    counted, ids = (
      data.tokenize(texts, tokenizer)
      for texts in (data.read(options.data), documents)
    )
    counts = ngram.Trigram(counted, tokenizer.vocab_size)
    loss = -counts.log_probs(ids).mean()
    rows.append(("3-gram", describe(loss, len(ids), num_bytes)))
  terminal.report(terminal.table(rows))


def describe(loss: float, num_tokens: int, num_bytes: int) -> str:
  """Formats a loss in nats a token, in both units."""
  bits = loss * num_tokens / num_bytes / math.log(2)
  return f"{loss:.3f} nats a token, {bits:.3f} bits a byte"


main = app.Program(__doc__, define, compare)
