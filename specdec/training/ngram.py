"""A 3-gram model by counting: what a learned model must beat.

Kneser-Ney smoothing, interpolated (Chen and Goodman, 1998). Invariant: every
distribution it gives sums to one and gives every token something.
"""

import numpy as np


class Trigram:
  """Counts of a token stream, ready to say the distribution after any two
  tokens.
  """

  def __init__(self, stream: np.ndarray, vocab_size: int):
    """`stream` [n >= 3] ids below `vocab_size`."""
    if len(stream) < 3:
      raise ValueError(f"{len(stream)} tokens; a 3-gram takes 3")
    self.vocab_size = size = vocab_size
    t = stream.astype(np.int64)
    triples = _Counts((t[:-2] * size + t[1:-1]) * size + t[2:])
    # Below the highest order, what counts is after how many different tokens
    # something was seen, not how often.
    pairs = _Counts(triples.keys % size**2)
    singles = _Counts(pairs.keys % size)
    self._orders = [
      _Order(counts, size) for counts in (singles, pairs, triples)
    ]

  def log_probs(self, tokens: np.ndarray) -> np.ndarray:
    """[n - 2]: log P(tokens[i] | the two before it) for i >= 2."""
    t = tokens.astype(np.int64)
    size = self.vocab_size
    last = t[2:]
    keys = [last, t[1:-1] * size + last]
    keys.append((t[:-2] * size + t[1:-1]) * size + last)
    distribution = np.full(len(last), 1 / size)
    for order, key in zip(self._orders, keys):
      distribution = order.mix(key, distribution)
    return np.log(distribution)


class _Counts:
  """Distinct keys, ascending, and how often each occurs."""

  def __init__(self, keys: np.ndarray):
    self.keys, self.values = np.unique(keys, return_counts=True)

  def at(self, keys: np.ndarray) -> np.ndarray:
    """Counts of `keys`, 0 for those never seen."""
    where = np.searchsorted(self.keys, keys)
    where = np.minimum(where, len(self.keys) - 1)
    return np.where(self.keys[where] == keys, self.values[where], 0)


class _Order:
  """One order: discounted counts, the rest by the order below."""

  def __init__(self, counts: _Counts, size: int):
    self._counts, self._size = counts, size
    contexts = counts.keys // size
    self._kinds = _Counts(contexts)  # different continuations of a context
    starts = np.searchsorted(contexts, self._kinds.keys)
    self._totals = np.add.reduceat(counts.values, starts)
    once, twice = (np.sum(counts.values == n) for n in (1, 2))
    # Where nothing was seen just once, as in a small text, there is no guide.
    self._discount = once / (once + 2 * twice) if once else 0.5

  def mix(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """P(last token of each key | the others); `lower`: given one less."""
    contexts = keys // self._size
    kinds = self._kinds.at(contexts)
    where = np.searchsorted(self._kinds.keys, contexts)
    where = np.minimum(where, len(self._totals) - 1)
    total = np.where(kinds > 0, self._totals[where], 1)
    kept = np.maximum(self._counts.at(keys) - self._discount, 0) / total
    spare = self._discount * kinds / total
    return np.where(kinds > 0, kept + spare * lower, lower)
