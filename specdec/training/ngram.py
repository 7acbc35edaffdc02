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
    self.vocab_size = size = vocab_size
    t = ids.astype(np.int64)
    triples = _Counts((t[:-2] * size + t[1:-1]) * size + t[2:])
    # Lower orders count the distinct tokens before an n-gram, not its
    # occurrences.
    pairs = _Counts(triples.keys % size**2)
    singles = _Counts(pairs.keys % size)
    self._orders = [
      _Order(counts, size) for counts in (singles, pairs, triples)
    ]

  def log_probs(self, tokens: np.ndarray) -> np.ndarray:
    """Returns log P(tokens[i] | tokens[i-2 : i]) for i >= 2: [n - 2]."""
    t = tokens.astype(np.int64)
    size = self.vocab_size
    last = t[2:]
    keys = [last, t[1:-1] * size + last]
    keys.append((t[:-2] * size + t[1:-1]) * size + last)
    probs = np.full(len(last), 1 / size)
    for order, key in zip(self._orders, keys):
      probs = order.interpolate(key, probs)
    return np.log(probs)


class _Counts:
  """Distinct keys in ascending order, with their counts."""

  def __init__(self, keys: np.ndarray):
    self.keys, self.values = np.unique(keys, return_counts=True)

  def at(self, keys: np.ndarray) -> np.ndarray:
    """Returns the counts of `keys`, 0 for unseen ones."""
    index = self.index(keys)
    return np.where(self.keys[index] == keys, self.values[index], 0)

  def index(self, keys: np.ndarray) -> np.ndarray:
    """Returns the index of each key; any valid index for unseen ones."""
    return np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)


class _Order:
  """Absolute discounting of one order, interpolated with the order below."""

  def __init__(self, counts: _Counts, size: int):
    self._counts, self._size = counts, size
    contexts = counts.keys // size
    self._distinct = _Counts(contexts)  # distinct continuations of a context
    starts = np.searchsorted(contexts, self._distinct.keys)
    self._totals = np.add.reduceat(counts.values, starts)
    once, twice = (np.sum(counts.values == n) for n in (1, 2))
    # Small texts may have no n-gram that occurs once.
    self._discount = once / (once + 2 * twice) if once else 0.5

  def interpolate(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Returns P(last token | context) of each key.

    Args:
      keys: [n] of n-grams.
      lower: [n] probabilities given a context one token shorter.
    """
    contexts = keys // self._size
    distinct = self._distinct.at(contexts)
    total = self._totals[self._distinct.index(contexts)]
    total = np.where(distinct > 0, total, 1)
    discounted = np.maximum(self._counts.at(keys) - self._discount, 0) / total
    remaining = self._discount * distinct / total
    return np.where(distinct > 0, discounted + remaining * lower, lower)
