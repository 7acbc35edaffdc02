"""The bookkeeping of a generation: origins, log-probabilities and counts."""

import jax
import numpy as np

from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  NO_DRAFT,
  PROMPT,
  Array,
  DecodeState,
)


def check_books(
  state: DecodeState, prompt_length: Array, k: int | None = None
) -> None:
  """Asserts that a state's origins, log-probabilities and counts agree.

  Args:
    state: of the end of a generation.
    prompt_length: [B].
    k: tokens that every round drafts; None where it varies.
  """
  origin, length = np.asarray(state.origin), np.asarray(state.length)
  stats = jax.tree.map(np.asarray, state.stats)
  draft_log_probs = np.asarray(state.draft_log_probs)
  for b, start in enumerate(np.asarray(prompt_length)):
    assert np.all(origin[b, :start] == PROMPT)
    assert np.all(origin[b, length[b] :] == PROMPT)  # nothing was written
    emitted = origin[b, start : length[b]]
    assert np.all(emitted != PROMPT)
    num_accepted = int(np.sum(emitted == ACCEPTED))
    assert stats.accepted[b].sum() == num_accepted
    # A round emits what it accepts and one token more, unless a cut took it.
    cut = int(len(emitted) > 0 and emitted[-1] == ACCEPTED)
    assert stats.rounds[b] == len(emitted) - num_accepted + cut
    assert np.all(stats.accepted[b] <= stats.evaluated[b])
    assert np.all(stats.evaluated[b] <= stats.drafted[b])
    # An evaluated token that was not accepted is a correction.
    refused = np.sum(stats.evaluated[b] - stats.accepted[b])
    assert refused == np.sum(emitted == CORRECTION)
    assert np.all(np.diff(stats.accepted[b]) <= 0)
    assert np.all(np.diff(stats.drafted[b]) <= 0)
    if k is not None:
      assert stats.nodes[b] == k * stats.rounds[b]
    run = 0
    for code in emitted:
      if code == ACCEPTED:
        run += 1
        assert k is None or run <= k
        continue
      if k is not None:
        expected = BASELINE if k == 0 else BONUS if run == k else CORRECTION
        assert code == expected
      run = 0
    compared = np.isin(emitted, [ACCEPTED, CORRECTION])
    absent = draft_log_probs[b, start : length[b]] == NO_DRAFT
    np.testing.assert_array_equal(absent, ~compared)


class Broken(Exception):
  """(what is wrong, name of the invariant); the caller adds who it is."""


def require(holds, sentence: str, name: str = "") -> None:
  """Raises Broken unless something holds."""
  if not holds:
    raise Broken(sentence, name)
