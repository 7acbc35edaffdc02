"""The most tokens that any lossless verifier could accept, on small tables.

A round sees a draft, accepts one of its nodes with all above it and emits a
token after it; the target writes on. Over all ways to do so that leave the
target's distribution, the largest expected number of accepted tokens is a
linear program: what a rule falls short of it is the rule's own loss, not the
draft's. On one path block verification reaches it (arXiv:2403.10444).
"""

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
  # Unknown: P(node n is the last | draft m), and how often a text and a token
  # after it are emitted, over how often the target writes them.
  ends = num_drafts * num_nodes
  emits = len(spelled) * vocab_size
  terms, right = _Terms(), []

  for draft in range(num_drafts):  # every draft ends somewhere
    for node in range(num_nodes):
      terms.add(len(right), draft * num_nodes + node, 1.0)
    right.append(1.0)
  first = len(right)  # a round that ends after a text emits a token
  right += [0.0] * len(spelled)
  scale = [_prob(target_distributions, text) or 1.0 for text in spelled]
  for draft, row in enumerate(texts):
    for node, text in enumerate(row):
      i = number[text]
      share = drafts.weight[draft] / scale[i]
      terms.add(first + i, draft * num_nodes + node, -share)
  for text, i in number.items():
    for token, prob in enumerate(target_distributions[len(text)][text]):
      if _prob(target_distributions, text) > 0:  # else nothing ends here
        terms.add(first + i, ends + i * vocab_size + token, prob)

  # Lossless: texts of D + 1 tokens, written on by the target where a round was
  # shorter, have its distribution.
  whole = int(depths.max()) + 1
  for text in np.ndindex((vocab_size,) * whole):
    if _prob(target_distributions, text) <= 0:
      continue
    for size in range(whole):
      if (i := number.get(text[:size])) is not None:
        terms.add(len(right), ends + i * vocab_size + text[size], 1.0)
    right.append(1.0)
  matrix = sparse.csr_array(
    (terms.values, (terms.rows, terms.columns)),
    shape=(len(right), ends + emits),
  )
  gain = (drafts.weight[:, None] * depths).reshape(-1)
  gain = np.concatenate([gain, np.zeros(emits)])
  solution = optimize.linprog(-gain, A_eq=matrix, b_eq=right, method="highs")
  if not solution.success:
    raise ValueError(f"no optimum: {solution.message}")
  return float(-solution.fun)


class _Terms:
  """Coefficients of equations, one by one."""

  def __init__(self):
    self.rows, self.columns, self.values = [], [], []

  def add(self, row: int, column: int, value: float) -> None:
    self.rows.append(row)
    self.columns.append(column)
    self.values.append(value)


def _prob(distributions: Distributions, text: tuple[int, ...]) -> float:
  """Probability of a text."""
  steps = range(1, len(text) + 1)
  return float(np.prod([distributions[n - 1][text[:n]] for n in steps]))
