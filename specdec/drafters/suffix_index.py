"""A suffix array over texts: built on the host, searched on device.

Manber and Myers (1990), by prefix doubling. Suffixes are sorted by their first
`DEPTH` tokens, so the suffixes that begin with one pattern are a contiguous
range, and within it those that go on alike are contiguous again. Invariant: a
separator, which is no token, stands after each text, so that no match and no
continuation crosses from one text to the next.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec.types import Array

DEPTH = 128  # tokens by which suffixes are sorted: of a match and what follows
MOST_TOKENS = 2**24  # of an index; positions and their products are int32
_END = -1  # stands after each text


class SuffixIndex(NamedTuple):
  """Two arrays of M: 8 bytes a token. Params.draft of the suffix drafter."""

  tokens: Array  # [M] int32, _END after each text
  order: Array  # [M] int32: where the suffixes begin, in sorted order


def shapes(texts: Sequence[Sequence[int]]) -> SuffixIndex:
  """Returns the index of texts as shapes: what it would hold, not sorted.

  Raises:
    ValueError: the texts hold no token, or more than an index can.
  """
  size = sum(len(text) + 1 for text in texts if len(text))
  if not size:
    raise ValueError("an index of suffixes needs a text, and there is none")
  if size > MOST_TOKENS:
    raise ValueError(
      f"{size:,} tokens are too many for an index of suffixes; at most "
      f"{MOST_TOKENS:,}"
    )
  one = jax.ShapeDtypeStruct((size,), np.int32)
  return SuffixIndex(one, one)


def build(texts: Sequence[Sequence[int]]) -> SuffixIndex:
  """Sorts the suffixes of texts, on the host.

  Returns:
    The index as NumPy arrays.

  Raises:
    ValueError: as `shapes`.
  """
  [size] = shapes(texts).tokens.shape
  parts = [np.asarray([*text, _END], np.int32) for text in texts if len(text)]
  tokens = np.concatenate(parts)
  rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
  order, span = np.argsort(rank, kind="stable"), 1
  while span < DEPTH and rank.max() < size - 1:
    behind = np.zeros(size, np.int64)  # 0: beyond the last text
    behind[: max(size - span, 0)] = rank[span:] + 1
    key = rank * (size + 1) + behind
    order = np.argsort(key, kind="stable")
    step = np.diff(key[order], prepend=key[order[0]]) > 0
    rank[order] = np.cumsum(step)
    span *= 2
  return SuffixIndex(tokens, order.astype(np.int32))


def search(
  index: SuffixIndex, pattern: Array, length: Array
) -> tuple[Array, Array]:
  """Returns the range [low, high) of `order` whose suffixes begin with a
  pattern.

  By bisection: a trip gathers two windows of the pattern's size.

  Args:
    pattern: [P], of which the first `length` tokens count; P <= DEPTH.
  """
  size = index.order.shape[0]
  column = jnp.arange(pattern.shape[0])

  def halve(_, bounds):
    low, high = bounds  # each [2]: of the first that is not less, and of the
    middle = (low + high) // 2  # first that is greater
    start = index.order[jnp.minimum(middle, size - 1)]
    # Beyond the last text lies its separator, again and again.
    window = index.tokens.at[start[:, None] + column[None]].get(mode="clip")
    differs = (window != pattern[None]) & (column < length)[None]
    first = jnp.argmax(differs, axis=1)
    ours = jnp.take_along_axis(window, first[:, None], axis=1)[:, 0]
    equal = ~jnp.any(differs, axis=1)
    before = jnp.where(equal, jnp.array([False, True]), ours < pattern[first])
    open_ = low < high
    low = jnp.where(open_ & before, middle + 1, low)
    return low, jnp.where(open_ & ~before, middle, high)

  bounds = jnp.zeros(2, jnp.int32), jnp.full(2, size, jnp.int32)
  low, _ = jax.lax.fori_loop(0, size.bit_length() + 1, halve, bounds)
  return low[0], low[1]


def longest_match(
  index: SuffixIndex, tokens: Array, length: Array, most: int
) -> tuple[Array, Array, Array]:
  """Returns the length of the longest match of a text's end, and its range.

  All lengths are searched for side by side, in one bisection.

  Args:
    tokens: [L] of one row, of which tokens[:length] is text.
    most: longest match looked for.

  Returns:
    (matched, low, high); matched = 0 where not even the last token is there.
  """
  lengths = 1 + jnp.arange(most)
  start = length - lengths
  at = jnp.clip(start[:, None] + jnp.arange(most)[None], 0, tokens.shape[0] - 1)
  low, high = jax.vmap(search, (None, 0, 0))(index, tokens[at], lengths)
  # A suffix of what is there is there: as many lengths as the longest has.
  matched = jnp.sum((low < high) & (start >= 0))
  best = jnp.maximum(matched - 1, 0)
  return matched, low[best], high[best]


def continuations(
  index: SuffixIndex,
  matched: Array,
  low: Array,
  high: Array,
  places: int,
  depth: int,
) -> tuple[Array, Array]:
  """Returns what followed a match, and which places are in use.

  Of a range of more suffixes than `places`, evenly spaced ones. As those that
  go on alike are contiguous, at any depth, the share of each continuation among
  them is that of the whole range, to 1 / places.

  Returns:
    Tokens [places, depth], -1 where the text had ended; and [places] bool.
  """
  count = high - low
  place = jnp.arange(places)
  spread = place * (count // places) + place * (count % places) // places
  at = low + jnp.where(count > places, spread, place)
  used = place < count
  start = index.order.at[at].get(mode="clip") + matched
  window = start[:, None] + jnp.arange(depth)[None]
  after = index.tokens.at[window].get(mode="clip")
  ended = jnp.cumsum(after == _END, axis=1) > 0
  return jnp.where(ended | ~used[:, None], -1, after), used
