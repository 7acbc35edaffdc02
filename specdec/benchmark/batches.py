"""Cuts prompts into batches, and holds what decoding makes of each.

Rows that end where a distribution is not finite are found and named here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from specdec import multihost
from specdec.types import NO_FAULT, TARGET_FAULT, DecodeState, Stats

PROMPT_STEP = 64  # prompt buffers are multiples of it: few shapes to compile


def prompt_size(prompts: Sequence[Sequence[int]]) -> int:
  """Returns P, the size of a buffer that holds each of these prompts."""
  longest = max(len(prompt) for prompt in prompts)
  return -(-longest // PROMPT_STEP) * PROMPT_STEP


def faults_of(state: DecodeState, numbers: Sequence[int]) -> list[str]:
  """Returns a sentence for each of the first rows, with prompts of these
  numbers, that ends where a distribution is not finite."""
  fault = multihost.whole(state.fault)
  length = multihost.whole(state.length)
  return [
    f"prompt {number} ends at token {length[i]} of prompt and output, where "
    f"the {'target' if fault[i] == TARGET_FAULT else 'draft'}'s probabilities "
    "are not finite: its weights hold or make NaN or infinity (in bfloat16 try "
    "--dtype=float32)"
    for i, number in enumerate(numbers)
    if fault[i] != NO_FAULT
  ]


def check_finite(state: DecodeState, numbers: Sequence[int]) -> None:
  """Raises ValueError with the first sentence of `faults_of`, if any."""
  if faults := faults_of(state, numbers):
    raise ValueError(faults[0])


class Batch(NamedTuple):
  """Prompts that are decoded together."""

  rows: Sequence[Sequence[int]]  # token ids
  numbers: Sequence[int]  # of the prompts; they name the rows' noise


def batches_of(rows: Sequence[Sequence[int]], size: int) -> list[Batch]:
  """Cuts prompts, numbered from 0, into batches of `size`."""
  return [
    Batch(rows[i : i + size], range(i, min(i + size, len(rows))))
    for i in range(0, len(rows), size)
  ]


class Completed(NamedTuple):
  """One decoded batch."""

  texts: list[list[int]]  # new token ids of each row
  seconds: float  # of decoding rounds alone
  prefill_seconds: float
  stats: Stats  # NumPy, of the rows that hold prompts
  faults: list[str]  # which texts ended where a distribution was not finite

  @property
  def num_tokens(self) -> int:
    """New tokens of all rows."""
    return sum(map(len, self.texts))

  @property
  def num_rounds(self) -> int:
    """Rounds of the batch, each of which is one pass of the target."""
    return int(self.stats.widths.sum())


class NewTokens(NamedTuple):
  """What some rounds added to one row; all of one length."""

  ids: np.ndarray
  origins: np.ndarray
  log_probs: np.ndarray
  draft_log_probs: np.ndarray


def stats_of(state: DecodeState, count: int) -> Stats:
  """Returns the first rows' counts, on the host."""
  stats = jax.tree.map(multihost.whole, state.stats)
  rows = jax.tree.map(lambda x: x[:count], stats)
  return rows.replace(widths=stats.widths)
