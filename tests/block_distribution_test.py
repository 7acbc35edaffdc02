"""Texts of heads that draft in one pass: 20,000 rows against the target's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  drafters,
  sampling,
)
from text_statistics import SMALLEST_P, p_value

V, NEW, ROWS = learned_kinds.TABLE.vocab_size, 3, 20_000
CHAIN = draft_shape.chain(3)
TREE = draft_shape.static([-1, 0, 0, 1, 1], "iid")
LIKELIEST = draft_shape.dynamic(4, 3, 4)
DECIDED = draft_length.adaptive(3, [1.0, 1.2, 1.4, 1.6])
REJECTION, BLOCK = acceptance.rejection(), acceptance.block()
TRAVERSAL = acceptance.traversal()
SLOW = pytest.mark.slow
WINDOWS = {"windowed": 3, "published_block": 2}  # texts are of 1 + NEW tokens


def exact(params) -> np.ndarray:
  """[V] * NEW joint distribution of the tokens after a 0, by the table."""
  table = jax.nn.softmax(jnp.asarray(params.target["table"]), axis=-1)
  table, joint = np.asarray(table, float), np.ones(())
  for depth in range(NEW):
    level = np.empty((V,) * (depth + 1))
    for text in np.ndindex(*(V,) * depth):
      past = (V, 0, *text)
      level[text] = table[past[-2], past[-1]]
    joint = joint[..., None] * level
  return joint


def drafter_of(kind, shape):
  """(drafter, Params)."""
  if kind == "pard":
    draft, mask = learned_kinds.TABLE, V - 1
    return drafters.pard(draft, mask, shape=shape), learned_kinds.TABLES
  return learned_kinds.of_table(kind, (), shape, window=WINDOWS.get(kind, 0))


def p_of(drafter, params, rule) -> float:
  state = decode.start(
    learned_kinds.STREAMS,
    drafter,
    rule,
    params,
    jnp.zeros((ROWS, 1), jnp.int32),
    jnp.ones((ROWS,), jnp.int32),
    jax.random.key(5),
    max_length=1 + NEW,
    sampling=sampling.settings(ROWS, 1.0),
  )
  never = jnp.array([-1])
  state = decode.run(
    learned_kinds.STREAMS, drafter, rule, params, state, never,
    decode.MAX_ROUNDS,
  )  # fmt: skip
  assert int(jnp.sum(state.stats.accepted)) > ROWS // 4
  widths = state.stats.widths
  assert np.count_nonzero(widths) >= min(2, len(widths))  # it does decide
  return p_value(np.asarray(state.tokens[:, 1:]), exact(params))


@pytest.mark.parametrize(
  "kind, shape, rule",
  [
    ("dspark", CHAIN, REJECTION),
    pytest.param("dspark", DECIDED, REJECTION, marks=SLOW),
    pytest.param("dspark", TREE, TRAVERSAL, marks=SLOW),
    pytest.param("dflash", LIKELIEST, REJECTION, marks=SLOW),
    pytest.param("dflash2", LIKELIEST, REJECTION, marks=SLOW),
    *(
      pytest.param(kind, shape, rule, marks=SLOW)
      for kind in (*learned_kinds.BLOCKS, "peagle", "pard")
      if kind != "dspark"
      for shape, rule in ((CHAIN, BLOCK), (CHAIN, REJECTION), (TREE, REJECTION))
    ),
  ],
)
def test_20000_rows_have_the_targets_distribution(kind, shape, rule):
  drafter, params = drafter_of(kind, shape)
  assert p_of(drafter, params, rule) > SMALLEST_P


def test_a_distribution_that_is_not_the_drafts_is_seen():
  """What is handed over is a little flatter than what was drawn from."""
  drafter, params = learned_kinds.of_table("dspark", (), CHAIN)
  propose = drafter.propose

  def flatter(params, state, context):
    draft, state = propose(params, state, context)
    log_probs = jax.nn.log_softmax(0.7 * draft.log_probs)
    return draft._replace(log_probs=log_probs), state

  wrong = drafter._replace(propose=flatter)
  assert p_of(wrong, params, REJECTION) < SMALLEST_P
