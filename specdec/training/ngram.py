"""Trigram model with interpolated Kneser-Ney smoothing, as a baseline loss.

See Chen and Goodman (1998). Invariant: every conditional distribution sums to
one and gives every token a positive probability.
"""

import numpy as np


class Trigram:
  """Trigram model of a token sequence."""

  def __init__(self, ids: np.ndarray, vocab_size: int):
    """Counts the n-grams of a text.

    Args:
      ids: [n] with n >= 3, below `vocab_size`.

    Raises:
      ValueError: there are fewer than 3 tokens.
    """
    if len(ids) < 3:
      raise ValueError(f"the text has {len(ids)} tokens; a trigram needs 3")
    self._size = vocab_size
    keys = self._keys(ids, 3)
    self._orders = []
    for order in (3, 2, 1):
      counts = _Counts(keys)
      self._orders.insert(0, counts)
      # Lower orders count the distinct tokens before an n-gram, not its
      # occurrences.
      keys = counts.keys % vocab_size ** (order - 1)

  def log_probs(self, tokens: np.ndarray) -> np.ndarray:
    """Returns log P(tokens[i] | tokens[i-2 : i]) for i >= 2: [n - 2]."""
    probs = np.full(len(tokens) - 2, 1 / self._size)
    for order, counts in enumerate(self._orders, 1):
      probs = self._interpolate(counts, self._keys(tokens, order), probs)
    return np.log(probs)

  def _keys(self, tokens: np.ndarray, order: int) -> np.ndarray:
    """Numbers the n-grams that end at each token but the first two."""
    keys = np.zeros(len(tokens) - 2, np.int64)
    for i in range(3 - order, 3):
      keys = keys * self._size + tokens[i : len(tokens) - 2 + i]
    return keys

  def _interpolate(
    self, counts: "_Counts", keys: np.ndarray, lower: np.ndarray
  ) -> np.ndarray:
    """Returns P(last token | context) of each key, by absolute discounting.

    Args:
      keys: [n] of n-grams.
      lower: [n] probabilities given a context one token shorter.
    """
    contexts = _Counts(counts.keys // self._size)  # with their continuations
    totals = np.add.reduceat(
      counts.values, np.searchsorted(counts.keys // self._size, contexts.keys)
    )
    once, twice = (np.sum(counts.values == n) for n in (1, 2))
    # Small texts may have no n-gram that occurs once.
    discount = once / (once + 2 * twice) if once else 0.5
    distinct = contexts.at(keys // self._size)
    total = totals[contexts.index(keys // self._size)]
    total = np.where(distinct > 0, total, 1)
    discounted = np.maximum(counts.at(keys) - discount, 0) / total
    remaining = discount * distinct / total
    return np.where(distinct > 0, discounted + remaining * lower, lower)


class _Counts:
  """Distinct keys in ascending order, with their counts."""

  def __init__(self, keys: np.ndarray):
    self.keys, self.values = np.unique(keys, return_counts=True)

  def index(self, keys: np.ndarray) -> np.ndarray:
    """Returns the index of each key; any valid index for unseen ones."""
    return np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)

  def at(self, keys: np.ndarray) -> np.ndarray:
    """Returns the counts of `keys`, 0 for unseen ones."""
    index = self.index(keys)
    return np.where(self.keys[index] == keys, self.values[index], 0)
