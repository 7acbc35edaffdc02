"""Which tree pays: what it is expected to keep over what a round of it costs.

Sequoia (arXiv:2402.12374), section 3.2. Acceptance is by a child's rank alone;
times are measured or predicted, this module does not ask by whom.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec import draft_tree

Path = tuple[int, ...]


class Choice(NamedTuple):
  """A static tree and what is expected of it."""

  paths: list[Path]  # for tree.from_paths; none: autoregressive decoding
  tokens: float  # a round, the target's own token included
  seconds: float  # a round


def expected_tokens(
  paths: Sequence[Path], acceptance: Sequence[float]
) -> float:
  """Tokens of a round: 1 and, over the nodes, the products along their paths.

  Args:
    acceptance: how often a node's r-th child is the one that is kept.
  """
  rates = np.asarray(acceptance, float)
  return 1.0 + float(sum(np.prod(rates[list(path)]) for path in paths))


def best(
  acceptance: Sequence[float],
  pass_seconds: Mapping[int, float],
  level_seconds: float,
) -> Choice:
  """The tree with the most tokens a second, of any size and depth.

  Args:
    acceptance: by the child's rank.
    pass_seconds: T(n), seconds of the target's pass over n nodes, the root
      included; between the given n it is interpolated, beyond the last nothing
      is tried.
    level_seconds: what the drafter takes for a level.

  Raises:
    ValueError: the time of one node is not given.
  """
  if 1 not in pass_seconds:
    raise ValueError(
      "pass_seconds lacks 1, the time of autoregressive decoding"
    )
  known = sorted(pass_seconds)
  times = [pass_seconds[n] for n in known]
  found = Choice([], 1.0, pass_seconds[1])
  for levels in range(1, known[-1]):
    by_depth = np.tile(np.asarray(acceptance, float), (levels, 1))
    improved = False
    for size in range(1, known[-1]):
      paths = draft_tree.optimal(by_depth, size)
      if len(paths) < size or len(paths[-1]) < levels:
        continue  # no such tree, or the same as with fewer levels
      improved = True
      seconds = float(np.interp(size + 1, known, times))
      seconds += levels * level_seconds
      tokens = expected_tokens(paths, acceptance)
      if tokens / seconds > found.tokens / found.seconds:
        found = Choice(paths, tokens, seconds)
    if not improved:
      break
  return found
