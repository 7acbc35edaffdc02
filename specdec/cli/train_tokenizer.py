"""Trains a byte-level BPE tokenizer on a folder of text or a JSONL file.

  python scripts/train_tokenizer.py --data=corpus/train --output=tokenizer

Writes tokenizer.json and tokenizer_config.json, which this repository and
transformers read. Any text can be encoded: bytes are the alphabet. Id 0 is the
token that ends a document.
"""

from pathlib import Path

from specdec.cli import app
from specdec.training import bpe, data
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("data", None, "Folder or file.")
  flags.integer("vocab_size", 4096, "Tokens, bytes included.")
  flags.string("output", "tokenizer", "Folder to write.")


def train(options: app.Options) -> None:
  """Reads, trains, writes."""
  if not options.data:
    raise ValueError("give --data, a folder or a file of text")
  app.check_at_least(options, bpe.MIN_SIZE, "vocab_size")
  app.check_folder("--output", options.output)
  texts = data.read_texts(options.data)
  tokenizer = bpe.train(texts, options.vocab_size)
  bpe.save(tokenizer, Path(options.output))
  sample = texts[: 1 + len(texts) // 20]
  terminal.report(
    f"{tokenizer.get_vocab_size()} tokens; "
    f"{bpe.bytes_per_token(tokenizer, sample):.2f} bytes a token on "
    f"{len(sample)} of its documents"
  )


main = app.Program(__doc__, define, train)
