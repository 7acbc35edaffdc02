"""The most tokens that any lossless verifier could accept, on small tables.

A round sees a draft, accepts one of its nodes with all above it and emits a
token after it; the target writes on. Over all ways to do so that leave the
target's distribution, the largest expected number of accepted tokens is a
linear program: what a rule falls short of it is the rule's own loss, not the
draft's. On one path block verification reaches it (arXiv:2403.10444).
"""

from collections.abc import Sequence

import numpy as np

from specdec import draft_tree
from specdec.testing.enumeration import Distributions, Drafts, path_of


def accepted_at_most(
  drafts: Drafts,
  target_distributions: Distributions,
  *,
  count: int | None = None,
) -> float:
  """Solves the program for drafts that are sampled as `drafts` says.

  Args:
    drafts: of enumeration.drafts.
    target_distributions: distribution[d] for d <= D, the draft's depth.
    count: nodes in use, default all.

  Returns:
    Expected accepted tokens of a round; the token that follows them, which
    every round has, is not counted.

  Raises:
    ValueError: the solver does not find an optimum.
  """
  from scipy import optimize, sparse  # costs a second to import

  vocab_size = len(target_distributions[0])
  nodes = slice(count)
  depths = draft_tree.depth(drafts.parents)[:, nodes]
  texts = [
    [
      tuple(row[path_of(tree, node)].tolist())
      for node in range(len(row))[nodes]
    ]
    for row, tree in zip(drafts.tokens, drafts.parents)
  ]
  # What may be emitted: a text that some draft spells, and a token after it.
  spelled = sorted({text for row in texts for text in row})
  number = {text: i for i, text in enumerate(spelled)}
  num_drafts, num_nodes = depths.shape
  ends = num_drafts * num_nodes  # ends[m, n]: draft m, and node n is the last
  emits = len(spelled) * vocab_size  # emits[t, y]: text t, then token y
  terms, right = _Terms(), []

  for draft, row in enumerate(texts):  # every draft ends somewhere
    for node in range(len(row)):
      terms.add(len(right), draft * num_nodes + node, 1.0)
    right.append(drafts.weight[draft])
  first = len(right)  # what ends after a text is emitted with a token
  right += [0.0] * len(spelled)
  for draft, row in enumerate(texts):
    for node, text in enumerate(row):
      terms.add(first + number[text], draft * num_nodes + node, -1.0)
  for row in number.values():
    for token in range(vocab_size):
      terms.add(first + row, ends + row * vocab_size + token, 1.0)

  # Lossless: texts of D + 1 tokens, written on by the target where the round was
  # shorter, have its distribution.
  whole = depths.max() + 1
  for text in np.ndindex((vocab_size,) * whole):
    after = [target_distributions[d][text[: d + 1]] for d in range(whole)]
    if min(after) <= 0:
      continue
    rest = np.append(np.cumprod(after[::-1])[::-1], 1.0)  # P(from token d on)
    for size in range(whole):
      if (row := number.get(text[:size])) is not None:
        column = ends + row * vocab_size + text[size]
        terms.add(len(right), column, rest[size + 1] / rest[0])
    right.append(1.0)
  bounds = np.full((ends + emits, 2), (0.0, np.inf))
  for text, row in number.items():  # no token that the target never writes
    bounds[ends + row * vocab_size :, 1][:vocab_size] = np.where(
      _prob(target_distributions, text) > 0, np.inf, 0.0
    )
  matrix = sparse.csr_array(
    (terms.values, (terms.rows, terms.columns)),
    shape=(len(right), ends + emits),
  )
  gain = np.concatenate([depths.reshape(-1), np.zeros(emits)])
  found = optimize.linprog(
    -gain, A_eq=matrix, b_eq=right, bounds=bounds, method="highs"
  )
  if not found.success:
    raise ValueError(f"no optimum: {found.message}")
  return float(-found.fun)


class _Terms:
  """Coefficients of equations, one by one."""

  def __init__(self):
    self.rows, self.columns, self.values = [], [], []

  def add(self, row: int, column: int, value: float) -> None:
    self.rows.append(row)
    self.columns.append(column)
    self.values.append(value)


def _prob(distributions: Sequence[np.ndarray], text) -> np.ndarray:
  """[V] probabilities of a text with each token after it."""
  prob = 1.0
  for depth in range(len(text)):
    prob = prob * distributions[depth][text[: depth + 1]]
  return prob * distributions[len(text)][text]
