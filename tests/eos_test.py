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
from texts import texts

V, K, L = 6, 4, 10
LIMITS = range(1, L + 1)
# Every first token with every limit: an EOS falls on every place of a block,
# before, on and after the limit.
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


MODEL = table_model.model(V)
DRAFTER = drafters.model(MODEL, K)
DRAFTS = {"perfect": counting(), "errs": counting(wrong_after=(1, 4))}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
  "eos_ids", [(e, e) for e in range(V)] + [(2, 5), (-1, 3), (-1, -2)]
)
def test_b16_eos_and_limit_at_every_place_of_a_block(draft, eos_ids):
  """Also where the prompt ends with that EOS, which ends nothing."""
  state = decode.generate(
    MODEL,
    DRAFTER,
    acceptance.rejection(),
    Params(counting(), DRAFTS[draft]),
    PROMPT,
    np.ones(len(ROWS), np.int32),
    jax.random.key(0),
    max_length=L,
    sampling=sampling.settings(len(ROWS)),
    limit=jnp.asarray(LIMIT),
    eos_ids=eos_ids,
  )
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
