"""Prompts of one length, for programs that time decoding."""

import bisect
import csv
import heapq
import pathlib
import statistics
import sys
import textwrap
from typing import NamedTuple

import numpy as np
from absl import flags

from specdec.benchmark import prompts
from specdec.checkpoints import shipped

# Held out of the shipped models' training.
_SOURCES = (textwrap, statistics, heapq, csv, bisect)
flags.DEFINE_integer("context", 128, "Tokens of every prompt.")
FLAGS = flags.FLAGS


_SHIPPED_TOKENS = 128  # most of the shipped prompts have about as many


class Batches(NamedTuple):
  """Prompts in whole batches, and what they are in words."""

  rows: list[list[list[int]]]
  source: str

  @property
  def shortest(self) -> int:
    return min(len(row) for batch in self.rows for row in batch)


def make_batches(target, batch: int, size: int, limit: int) -> Batches:
  """Prompts for whole batches, of at most `size` tokens.

  All of --prompt_file that have as many; else the shipped prompts; for longer
  contexts or larger batches Python source, or random tokens where the target
  has no tokenizer.

  Args:
    limit: most prompts, 0 for all there are; a batch is always filled.
  """
  shipped_texts = prompts.read(shipped.PROMPTS)
  most = max(batch, limit or len(shipped_texts))
  library = "of the Python standard library"
  if FLAGS.prompt_file:
    most = max(batch, limit or sys.maxsize)
    rows = make_rows(target, most, size, batch)
    source = (
      f"prompts of {', '.join(FLAGS.prompt_file)}, their first {size} tokens"
    )
  elif target.tokenizer is None:
    rows = make_rows(target, batch, size)
    source = f"prompts of {size} random tokens"
  elif size <= _SHIPPED_TOKENS and batch <= len(shipped_texts):
    vocab_size = target.config.vocab_size
    rows = prompts.encode(shipped_texts, target.tokenizer, False, vocab_size)
    rows = [ids[-size:] for ids in rows[:most]]
    held_out = "held-out " if FLAGS.target in shipped.names() else ""
    source = f"{held_out}functions {library}, {size} tokens each at most"
  else:
    rows = make_rows(target, most, size, batch)
    source = f"slices {library}, {size} tokens each"
  rows = rows[: len(rows) // batch * batch]
  return Batches(
    [rows[i : i + batch] for i in range(0, len(rows), batch)],
    f"{len(rows)} {source}",
  )


def make_rows(
  target, count: int, size: int, least: int | None = None
) -> list[list[int]]:
  """So many prompts of exactly `size` tokens.

  Of --prompt_file, else Python source of the standard library, or random
  tokens where the target has no tokenizer.

  Args:
    least: where there are fewer than `count`, as many are enough.
  """
  least = count if least is None else least
  vocab_size = target.config.vocab_size
  if FLAGS.prompt_file:
    wanted = [p for file in FLAGS.prompt_file for p in prompts.read(file)]
    encoded = prompts.encode(wanted, target.tokenizer, FLAGS.chat, vocab_size)
    rows = [ids[:size] for ids in encoded if len(ids) >= size]
    if len(rows) < least:
      raise ValueError(
        f"{len(rows)} prompts have --context={size} tokens or more and --batch "
        f"is {least}; give more of them, or a shorter context"
      )
    return rows[:count]
  if target.tokenizer is None:
    rng = np.random.default_rng(FLAGS.seed)
    return rng.integers(0, vocab_size, size=(count, size)).tolist()
  texts = [pathlib.Path(module.__file__).read_text() for module in _SOURCES]
  ids = [i for text in texts for i in target.tokenizer.encode(text)]
  count = max(least, min(count, len(ids) // size))
  if len(ids) < count * size:
    raise ValueError(
      f"there are {len(ids)} tokens of sample text and {count} x {size} are "
      "wanted; give --prompt_file"
    )
  step = len(ids) // count
  return [ids[b * step : b * step + size] for b in range(count)]
