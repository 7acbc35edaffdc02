"""A head's smaller vocabulary: the most frequent tokens of some text.

A distribution over fewer tokens is as good a draft distribution as any:
acceptance rules hold whatever the draft's distribution is (FR-Spec,
arXiv:2502.14856). A token that it cannot draft costs acceptance only.
"""

import numpy as np


def most_frequent(
  tokens: np.ndarray, count: int, vocab_size: int
) -> np.ndarray | None:
  """Returns the `count` most frequent ids, ascending; None for count 0.

  Ties go to the lower id. Ids that never occur fill up what is left.
  """
  if count == 0:
    return None
  counts = np.bincount(np.ravel(tokens), minlength=vocab_size)
  ids = np.sort(np.argsort(-counts, kind="stable")[:count])
  return ids.astype(np.int32)
