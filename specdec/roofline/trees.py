"""Searches the static tree with the most expected tokens per second.

Sequoia (arXiv:2402.12374), section 3.2: acceptance depends on a child's rank
alone. Times may be measured or predicted.
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


def expected_tokens(
  paths: Sequence[Path], acceptance: Sequence[float]
) -> float:
  """Returns E[tokens per round]: 1 and each node's product along its path.

  Args:
    acceptance: probability that a node's r-th child is the accepted one.
  """
  rates = np.asarray(acceptance, float)
  return 1.0 + float(sum(np.prod(rates[list(path)]) for path in paths))


def best(
  acceptance: Sequence[float],
  pass_seconds: Mapping[int, float],
  level_seconds: float,
) -> Choice:
  """Returns the tree with the most tokens per second, of any size and depth.

  Args:
    acceptance: by the child's rank.
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
    by_depth = np.tile(np.asarray(acceptance, float), (levels, 1))
    improved = False
    for size in range(1, sizes[-1]):
      paths = draft_tree.optimal(by_depth, size)
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
