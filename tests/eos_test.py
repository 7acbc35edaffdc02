"""Texts end where they should: at an EOS or at the limit, and not later."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec.testing import table_model
from specdec.testing.books import check_books
from specdec.types import Params
from texts import frozen, texts

V, K, L = 6, 4, 10
LIMITS = range(1, L + 1)
# Every first token with every limit: an EOS falls on every place of a block,
# before, on and behind the limit.
ROWS = list(itertools.product(range(V), LIMITS))
PROMPT = np.array([[start] for start, _ in ROWS])
LIMIT = np.array([limit for _, limit in ROWS])


def counting(wrong_after=()) -> dict:
  """Logits of a text that counts 0 1 2 .. V-1 0 ..; `wrong_after` repeats."""
  following = [(t if t in wrong_after else (t + 1) % V) for t in range(V)]
  logits = 9.0 * jnp.eye(V)[jnp.array(following)]
  return {"table": jnp.broadcast_to(logits[None], (V + 1, V, V))}


def expected(start, limit, eos_ids) -> tuple[int, ...]:
  text = [start]
  while len(text) < limit:
    text.append((text[-1] + 1) % V)
    if text[-1] in eos_ids:
      break
  return tuple(text)


TARGET = table_model.model(V)
DRAFTER = drafters.model(table_model.model(V), K)
DRAFTS = {"perfect": counting(), "errs": counting(wrong_after=(1, 4))}


def arguments(draft):
  return (
    TARGET,
    DRAFTER,
    acceptance.rejection(),
    Params(counting(), DRAFTS[draft]),
    PROMPT,
    np.ones(len(ROWS), np.int32),
    jax.random.key(0),
  )


OPTIONS = {
  "max_length": L,
  "sampling": sampling.settings(len(ROWS)),
  "limit": jnp.asarray(LIMIT),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
  "eos_ids", [(e, e) for e in range(V)] + [(2, 5), (-1, 3), (-1, -2)]
)
def test_b16_eos_and_limit_at_every_place_of_a_block(draft, eos_ids):
  state = decode.generate(*arguments(draft), eos_ids=eos_ids, **OPTIONS)
  assert texts(state) == [expected(*row, eos_ids) for row in ROWS]
  assert bool(jnp.all(state.done))
  # What was cut off was never written, and never counted.
  beyond = np.arange(L)[None] >= np.asarray(state.length)[:, None]
  assert not np.any(np.asarray(state.tokens)[beyond])
  assert not np.any(np.asarray(state.log_probs)[beyond])
  check_books(state, np.ones(len(ROWS), int), K)
  np.testing.assert_array_equal(state.target_cache.length, state.length - 1)
  if draft == "perfect":  # a cut is no refusal
    np.testing.assert_array_equal(state.stats.drafted, state.stats.accepted)


def test_b16_done_rows_stay_as_they_are():
  stream = decode.stream(*arguments("errs"), every=1, eos_ids=(3, 3), **OPTIONS)
  before = frozen(next(stream))
  assert np.array_equal(before.done, LIMIT == 1)
  rounds = 0
  for state in stream:
    after = frozen(state)
    still = before.done
    rounds += 1
    for name in ("tokens", "length", "done", "log_probs", "origin"):
      old, new = getattr(before, name), getattr(after, name)
      np.testing.assert_array_equal(old[still], new[still])
    for name in ("rounds", "drafted", "accepted", "nodes"):
      old, new = getattr(before.stats, name), getattr(after.stats, name)
      np.testing.assert_array_equal(old[still], new[still])
    np.testing.assert_array_equal(
      before.target_cache.length[still], after.target_cache.length[still]
    )
    assert np.all(after.length[~still] > before.length[~still])
    before = after
  assert rounds > 2

  whole = decode.generate(*arguments("errs"), eos_ids=(3, 3), **OPTIONS)
  whole = frozen(whole)
  jax.tree.map(
    np.testing.assert_array_equal,
    whole.replace(target_cache=None, draft_state=None),
    before.replace(target_cache=None, draft_state=None),
  )


def test_an_eos_in_the_prompt_ends_nothing():
  state = decode.generate(*arguments("perfect"), eos_ids=(0, 0), **OPTIONS)
  row = ROWS.index((0, L))
  assert texts(state)[row] == (0, 1, 2, 3, 4, 5, 0)
