"""Prompts of one length, for programs that time decoding."""

import bisect
import csv
import heapq
import pathlib
import statistics
import textwrap

import numpy as np
from absl import flags

from specdec import prompts

# Held out of the shipped models' training.
_SOURCES = (textwrap, statistics, heapq, csv, bisect)
flags.DEFINE_integer("context", 128, "Tokens of every prompt.")
FLAGS = flags.FLAGS


def make_rows(target, count: int, size: int) -> list[list[int]]:
  """So many prompts of exactly `size` tokens.

  Of --prompt_file, else Python source of the standard library, or random
  tokens where the target has no tokenizer.
  """
  vocab_size = target.config.vocab_size
  if FLAGS.prompt_file:
    wanted = [p for file in FLAGS.prompt_file for p in prompts.read(file)]
    encoded = prompts.encode(wanted, target.tokenizer, FLAGS.chat, vocab_size)
    rows = [ids[:size] for ids in encoded if len(ids) >= size]
    if len(rows) < count:
      raise ValueError(
        f"{len(rows)} prompts have --context={size} tokens or more and --batch "
        f"is {count}; give more of them, or a shorter context"
      )
    return rows[:count]
  if target.tokenizer is None:
    rng = np.random.default_rng(FLAGS.seed)
    return rng.integers(0, vocab_size, size=(count, size)).tolist()
  texts = [pathlib.Path(module.__file__).read_text() for module in _SOURCES]
  ids = [i for text in texts for i in target.tokenizer.encode(text)]
  if len(ids) < count * size:
    raise ValueError(
      f"there are {len(ids)} tokens of sample text and {count} x {size} are "
      "wanted; give --prompt_file"
    )
  step = len(ids) // count
  return [ids[b * step : b * step + size] for b in range(count)]
