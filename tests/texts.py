"""What the tests of the loop share: texts of rows, and their bookkeeping."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  NO_DRAFT,
  PROMPT,
)


def texts(state) -> list[tuple[int, ...]]:
  """Every row's committed tokens."""
  tokens, length = np.asarray(state.tokens), np.asarray(state.length)
  return [tuple(row[:n].tolist()) for row, n in zip(tokens, length)]


def frozen(state):
  """A copy on the host, so that the state may be donated."""
  state = state.replace(keys=jax.random.key_data(state.keys))
  return jax.tree.map(np.array, state)


def check_books(state, prompt_length, k=None) -> None:
  """Origins, log-probabilities' places and counts say the same.

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
    # A evaluated token that was not accepted is a correction.
    assert np.sum(stats.evaluated[b] - stats.accepted[b]) == np.sum(
      emitted == CORRECTION
    )
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
    said = draft_log_probs[b, start : length[b]]
    np.testing.assert_array_equal(said == NO_DRAFT, ~compared)


def forward(model, params, tokens) -> np.ndarray:
  """[B, L, V] logits of one pass over whole texts."""
  batch, size = tokens.shape
  cache = model.init_cache(batch, size)
  return jax.jit(lambda p, t: model.apply(p, t, cache)[0].logits)(
    params, jnp.asarray(tokens)
  )
