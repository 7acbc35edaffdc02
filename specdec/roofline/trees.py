"""Searches the static tree with the most expected tokens per second.

Sequoia (arXiv:2402.12374), section 3.2, where acceptance depends on a child's
rank; here it may depend on its depth as well. Times may be measured or
predicted.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec import draft_tree

Path = tuple[int, ...]


class Choice(NamedTuple):
  """A static tree and its expected rate."""

  paths: list[Path]  # for draft_tree.from_paths; empty: autoregressive decoding
  tokens: float  # expected per round, the target's token included
  seconds: float  # per round


def by_depth(acceptance: Sequence, levels: int) -> np.ndarray:
  """Returns acceptance [D, R], D <= levels, of that by rank or by depth too.

  Raises:
    ValueError: neither [R] nor [D, R].
  """
  rows = [np.atleast_1d(np.asarray(row, float)) for row in acceptance]
  if any(row.ndim > 1 for row in rows):
    raise ValueError("acceptance must be given by rank, or by depth and rank")
  if not any(map(np.ndim, acceptance)):
    return np.tile(np.concatenate(rows), (levels, 1))
  width = max(map(len, rows))
  return np.stack([np.pad(row, (0, width - len(row))) for row in rows[:levels]])


def expected_tokens(paths: Sequence[Path], acceptance: Sequence) -> float:
  """Returns E[tokens per round]: 1 and each node's product along its path.

  Args:
    acceptance: [R], probability that a node's r-th child is the accepted one;
      or [D, R], that below an accepted node of depth d.
  """
  if not paths:
    return 1.0
  rates = by_depth(acceptance, max(map(len, paths)))
  return 1.0 + float(
    sum(np.prod([rates[step] for step in enumerate(path)]) for path in paths)
  )


def best(
  acceptance: Sequence, pass_seconds: Mapping[int, float], level_seconds: float
) -> Choice:
  """Returns the tree with the most tokens per second, of any size and depth.

  Args:
    acceptance: as of `expected_tokens`.
    pass_seconds: n -> seconds of the target's pass over n nodes, the root
      included; linearly interpolated. The largest n bounds the tree.
    level_seconds: seconds that the drafter takes per level.

  Raises:
    ValueError: pass_seconds lacks n = 1.
  """
  if 1 not in pass_seconds:
    raise ValueError(
      "pass_seconds lacks 1, the time of autoregressive decoding"
    )
  sizes = sorted(pass_seconds)
  times = [pass_seconds[n] for n in sizes]
  choice = Choice([], 1.0, pass_seconds[1])
  for levels in range(1, sizes[-1]):
    rates = by_depth(acceptance, levels)
    improved = False
    for size in range(1, sizes[-1]):
      paths = draft_tree.optimal(rates, size)
      if len(paths) < size or len(paths[-1]) < levels:
        continue  # no such tree, or it has fewer levels
      improved = True
      seconds = float(np.interp(size + 1, sizes, times))
      seconds += levels * level_seconds
      tokens = expected_tokens(paths, acceptance)
      if tokens / seconds > choice.tokens / choice.seconds:
        choice = Choice(paths, tokens, seconds)
    if not improved:
      break
  return choice
