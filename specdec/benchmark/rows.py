"""Prompts of about one length, for programs that time decoding."""

import bisect
import csv
import heapq
import pathlib
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.benchmark import prompts
from specdec.benchmark.batches import Batch, batches_of
from specdec.checkpoints import Checkpoint, shipped

# Held out of the shipped models' training.
_MODULES = (textwrap, statistics, heapq, csv, bisect)
_SHIPPED_TOKENS = 128  # most of the shipped prompts have about as many


class Source(NamedTuple):
  """Where prompts come from.

  Without files they are Python source of the standard library, or random tokens
  where the target has no tokenizer.
  """

  checkpoint: Checkpoint
  files: Sequence[str] = ()
  chat: bool = False  # wrap prompts of files in the chat template
  seed: int = 0  # of random tokens


class Batches(NamedTuple):
  """Prompts in whole batches, and what they are in words."""

  batches: list[Batch]
  description: str

  @property
  def shortest(self) -> int:
    """Tokens of the shortest prompt."""
    return min(len(row) for batch in self.batches for row in batch.rows)


def make_batches(source: Source, batch: int, size: int, limit: int) -> Batches:
  """Returns whole batches of prompts of at most `size` tokens.

  Takes all prompts of the files that are as long; else the shipped prompts; for
  longer contexts or larger batches slices of Python source. At most `limit`, 0
  for all; a batch is always filled.
  """
  target = source.checkpoint
  shipped_prompts = prompts.read(shipped.prompts_of(target.source))
  most = max(batch, limit or len(shipped_prompts))
  library = "of the Python standard library"
  if source.files:
    rows = make_rows(source, max(batch, limit or sys.maxsize), size, batch)
    names = ", ".join(source.files)
    text = f"prompts of {names}, their first {size} tokens"
  elif target.tokenizer is None:
    rows = make_rows(source, batch, size)
    text = f"prompts of {size} random tokens"
  elif size <= _SHIPPED_TOKENS and batch <= len(shipped_prompts):
    vocab_size = target.config.vocab_size
    rows = prompts.encode(shipped_prompts, target.tokenizer, False, vocab_size)
    # A source's task is at its beginning, what to continue at a prompt's end.
    part = slice(size) if target.config.encoder_layers else slice(-size, None)
    rows = [ids[part] for ids in rows[:most]]
    ours = pathlib.Path(target.source).parent == shipped.FOLDER
    held_out = "held-out " if ours else ""
    text = f"{held_out}functions {library}, {size} tokens each at most"
  else:
    rows = make_rows(source, most, size, batch)
    text = f"slices {library}, {size} tokens each"
  rows = rows[: len(rows) // batch * batch]
  return Batches(batches_of(rows, batch), f"{len(rows)} {text}")


def make_rows(
  source: Source, count: int, size: int, least: int | None = None
) -> list[list[int]]:
  """Returns `count` prompts of exactly `size` tokens.

  The sources of an encoder-decoder, where files have them, are whole and have
  at most as many. Where there are fewer than `count`, `least` are enough.
  """
  target = source.checkpoint
  least = count if least is None else least
  vocab_size = target.config.vocab_size
  if source.files:
    wanted = [prompt for file in source.files for prompt in prompts.read(file)]
    encoded = prompts.encode(wanted, target.tokenizer, source.chat, vocab_size)
    rows = [ids[:size] for ids in encoded if len(ids) >= size]
    fitting, nearest = "more", max
    if target.config.encoder_layers:
      rows = [ids for ids in encoded if len(ids) <= size]
      fitting, nearest = "fewer", min
    if len(rows) < least:
      raise ValueError(
        f"{len(rows)} prompts have {size} tokens, the context, or {fitting}, "
        f"and one has {nearest(map(len, encoded))}; a batch or a sweep's texts "
        f"need {least}: give more of them, or another context"
      )
    return rows[:count]
  if target.tokenizer is None:
    rng = np.random.default_rng(source.seed)
    return rng.integers(0, vocab_size, size=(count, size)).tolist()
  texts = [pathlib.Path(module.__file__).read_text() for module in _MODULES]
  ids = [i for text in texts for i in target.tokenizer.encode(text)]
  count = max(least, min(count, len(ids) // size))
  if len(ids) < count * size:
    raise ValueError(
      f"there are {len(ids)} tokens of sample text and {count} x {size} are "
      "wanted; give --prompt_file"
    )
  step = len(ids) // count
  return [ids[b * step : b * step + size] for b in range(count)]
