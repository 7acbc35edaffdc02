"""Trigram model with interpolated Kneser-Ney smoothing, as a baseline loss.

See Chen and Goodman (1998). Invariant: every conditional distribution sums to
one and gives every token a positive probability.
"""

from typing import NamedTuple

import numpy as np


class _Order(NamedTuple):
  """Counts of the n-grams of one length, whose keys ascend."""

  keys: np.ndarray
  counts: np.ndarray
  contexts: np.ndarray  # keys of n-grams without their last token
  totals: np.ndarray  # sum of `counts` in each context
  distinct: np.ndarray  # number of n-grams in each context
  discount: float


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
    self._size, self._orders = vocab_size, []
    ngrams = self._keys(ids, 3)
    for order in (3, 2, 1):
      keys, counts = np.unique(ngrams, return_counts=True)
      contexts, first, distinct = np.unique(
        keys // vocab_size, return_index=True, return_counts=True
      )
      totals = np.add.reduceat(counts, first)
      once, twice = (np.sum(counts == n) for n in (1, 2))
      # Small texts may have no n-gram that occurs once.
      discount = once / (once + 2 * twice) if once else 0.5
      self._orders.insert(
        0, _Order(keys, counts, contexts, totals, distinct, discount)
      )
      # Lower orders count the distinct tokens before an n-gram, not its
      # occurrences.
      ngrams = keys % vocab_size ** (order - 1)

  def log_probs(self, tokens: np.ndarray) -> np.ndarray:
    """Returns log P(tokens[i] | tokens[i-2 : i]) for i >= 2: [n - 2]."""
    probs = np.full(len(tokens) - 2, 1 / self._size)
    for length, order in enumerate(self._orders, 1):  # absolute discounting
      keys = self._keys(tokens, length)
      contexts = keys // self._size
      distinct = _find(order.contexts, order.distinct, contexts)
      total = np.maximum(_find(order.contexts, order.totals, contexts), 1)
      count = _find(order.keys, order.counts, keys)
      discounted = np.maximum(count - order.discount, 0) / total
      remaining = order.discount * distinct / total
      probs = np.where(distinct > 0, discounted + remaining * probs, probs)
    return np.log(probs)

  def _keys(self, tokens: np.ndarray, order: int) -> np.ndarray:
    """Numbers the n-grams that end at each token but the first two."""
    keys = np.zeros(len(tokens) - 2, np.int64)
    for i in range(3 - order, 3):
      keys = keys * self._size + tokens[i : len(tokens) - 2 + i]
    return keys


def _find(
  keys: np.ndarray, values: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
  """Returns the values of keys, 0 for those that are not there."""
  index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[index] == wanted, values[index], 0)
