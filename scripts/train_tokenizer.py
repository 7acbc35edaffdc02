"""Trains a byte-level BPE tokenizer on a folder of text or a JSONL file.

  python scripts/train_tokenizer.py --data=corpus/train --output=tokenizer

Writes tokenizer.json and tokenizer_config.json, which this repository and
transformers read. Any text can be encoded: bytes are the alphabet. Id 0 is the
token that ends a document.
"""

import json
from pathlib import Path

import _main
import tokenizers
from absl import flags
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.training import data
from specdec.utils import files, terminal

END = "<|endoftext|>"

_DATA = flags.DEFINE_string("data", None, "Folder or file.", required=True)
_SIZE = flags.DEFINE_integer("vocab_size", 4096, "Tokens, bytes included.")
_OUTPUT = flags.DEFINE_string("output", "tokenizer", "Folder to write.")


def train() -> None:
  """Reads, trains, writes."""
  if _SIZE.value < 257:
    raise ValueError(f"--vocab_size={_SIZE.value}; it must be >= 257")
  _main.check_folder("--output", _OUTPUT.value)
  texts = [document.text for document in data.read(_DATA.value)]
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
  files.replace_file(output / "tokenizer.json", tokenizer.to_str(pretty=True))
  options = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
  }
  text = json.dumps(options, indent=2) + "\n"
  files.replace_file(output / "tokenizer_config.json", text)
  sample = texts[: 1 + len(texts) // 20]
  ids = sum(len(tokenizer.encode(text).ids) for text in sample)
  size = sum(len(text.encode()) for text in sample)
  terminal.report(
    f"{tokenizer.get_vocab_size()} tokens; {size / ids:.2f} bytes a token on "
    f"{len(sample)} of its documents"
  )


main = _main.main_of("train_tokenizer", train)

if __name__ == "__main__":
  _main.start(main)
