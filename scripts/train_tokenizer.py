"""Trains a byte-level BPE tokenizer on a folder of text or a JSONL file.

  python scripts/train_tokenizer.py --data=corpus/train --output=tokenizer

Writes tokenizer.json and tokenizer_config.json, which this repository and
transformers read. Any text can be encoded: bytes are the alphabet. Id 0 is the
token that ends a document.
"""

import json
import sys
from pathlib import Path

import tokenizers
from absl import app, flags
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.training import data

END = "<|endoftext|>"

_DATA = flags.DEFINE_string("data", None, "Folder or file.", required=True)
_SIZE = flags.DEFINE_integer("vocab_size", 4096, "Tokens, bytes included.")
_OUTPUT = flags.DEFINE_string("output", "tokenizer", "Folder to write.")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}")
  if _SIZE.value < 257:
    sys.exit(f"train_tokenizer: --vocab_size={_SIZE.value}; it must be >= 257")
  try:
    texts = [document.text for document in data.read(_DATA.value)]
  except (ValueError, FileNotFoundError) as error:
    sys.exit(f"train_tokenizer: {error}")
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.train_from_iterator(
    texts,
    trainers.BpeTrainer(
      vocab_size=_SIZE.value,
      special_tokens=[END],
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ),
    length=len(texts),
  )
  output = Path(_OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(output / "tokenizer.json"))
  options = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
  }
  text = json.dumps(options, indent=2) + "\n"
  (output / "tokenizer_config.json").write_text(text)
  sample = texts[: 1 + len(texts) // 20]
  ids = sum(len(tokenizer.encode(text).ids) for text in sample)
  size = sum(len(text.encode()) for text in sample)
  print(
    f"{tokenizer.get_vocab_size()} tokens; {size / ids:.2f} bytes a token on "
    f"{len(sample)} of its documents"
  )


if __name__ == "__main__":
  app.run(main)
