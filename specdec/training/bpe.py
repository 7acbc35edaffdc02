"""Trains a byte-level BPE tokenizer.

Invariant: any text can be encoded, since bytes are the alphabet; id 0 is the
token that ends a document.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec.utils import files

END = "<|endoftext|>"
MIN_SIZE = 257  # the bytes and END


def train(texts: Sequence[str], vocab_size: int) -> Tokenizer:
  """Trains on texts; gives fewer tokens where they have too few pairs.

  Raises:
    ValueError: vocab_size is less than MIN_SIZE.
  """
  if vocab_size < MIN_SIZE:
    raise ValueError(f"vocab_size = {vocab_size}; it must be >= {MIN_SIZE}")
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
  )
  tokenizer.train_from_iterator(texts, trainer, length=len(texts))
  return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  files.replace_file(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
  }
  text = json.dumps(config, indent=2) + "\n"
  files.replace_file(folder / "tokenizer_config.json", text)


def bytes_per_token(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
  """Measures how many bytes of these texts a token stands for."""
  tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
  return sum(len(text.encode()) for text in texts) / tokens
