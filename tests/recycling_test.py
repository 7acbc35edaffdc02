"""The table of successors by hand, and what the kit says of the drafter."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from planted import broken
from specdec import acceptance, draft_length, draft_shape, drafters
from specdec.testing import check_drafter
from specdec.testing.drafter_conformance import INVARIANTS
from specdec.types import (
  AcceptResult,
  Context,
  Draft,
  ModelOutput,
  Params,
)
from two_forms import slow

TABLE, TABLES = learned_kinds.TABLE, learned_kinds.TABLES
V = TABLE.vocab_size
REJECTION = (acceptance.rejection(),)
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])


def context_of(tokens):
  """Of rows whose texts end with these tokens."""
  tokens = jnp.asarray(tokens, jnp.int32)[:, None]
  length = jnp.ones(len(tokens), jnp.int32)
  return Context(tokens, length, None, None, None)


def result_of(path, committed):
  path, committed = jnp.asarray(path), jnp.asarray(committed)
  zero = jnp.zeros_like(committed)
  return AcceptResult(path, committed - 1, zero, committed, zero > 0, zero)


def test_a_table_is_followed():
  drafter = drafters.recycling(5, shape=TREE)
  context = context_of([2, 3])
  table = drafter.init(None, context, None)
  assert table.shape == (2, 5, 2)
  draft, _ = drafter.propose(None, table, context)
  assert draft.count.tolist() == [1, 1]  # it knows nothing yet
  table = table.at[0, 2].set(jnp.array([4, 1])).at[0, 4].set(jnp.array([3, 0]))
  draft, _ = drafter.propose(None, table, context)
  assert draft.count.tolist() == [6, 1]
  # 4 and 1 follow 2; 3 and 0 follow 4; of 1 nothing is known: token 0.
  assert draft.tokens[0].tolist() == [2, 4, 1, 3, 0, 0]


def test_a_chain_ends_where_nothing_is_known():
  drafter = drafters.recycling(5, 3)
  context = context_of([2, 3])
  table = drafter.init(None, context, None).at[0, 2].set(4).at[0, 4].set(1)
  draft, _ = drafter.propose(None, table, context)
  assert draft.count.tolist() == [3, 1]
  assert draft.tokens[0, :3].tolist() == [2, 4, 1]


def test_every_verified_node_is_learned_from():
  """Refused ones, too; of equal tokens the accepted path's, then the last."""
  drafter = drafters.recycling(5, shape=TREE)
  context = context_of([2, 2, 2])
  table = drafter.init(None, context, None)
  tokens = jnp.array(
    [[2, 4, 1, 4, 0, 4], [2, 4, 1, 4, 0, 4], [2, 4, 1, 3, 0, 1]]
  )
  logits = np.random.default_rng(0).normal(size=(3, 6, 5))
  output = ModelOutput(jnp.asarray(logits, jnp.float32), None)
  draft = Draft(tokens, None, None, jnp.array([6, 6, 6]))
  # Row 0 accepts nodes 0 and 1, row 1 node 0 alone; row 2 was done.
  result = result_of([[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]], [2, 1, 0])
  table = drafter.update(None, table, context, draft, result, output)
  best = np.argsort(-logits, axis=-1)[..., :2]
  np.testing.assert_array_equal(table[0, 4], best[0, 1])
  np.testing.assert_array_equal(table[1, 4], best[1, 5])
  for row in (0, 1):
    for token, node in ((2, 0), (1, 2), (0, 4)):
      np.testing.assert_array_equal(table[row, token], best[row, node])
    assert table[row, 3].tolist() == [-1, -2]
  assert jnp.all(table[2] < 0)
  # Of a round that verified the root alone, that node's.
  short = Draft(tokens[:, :1], None, None, jnp.array([1, 1, 1]))
  narrow = ModelOutput(output.logits[:, :1], None)
  result = result_of([[0]] * 3, [1, 1, 1])
  table = drafter.update(None, table, context, short, result, narrow)
  np.testing.assert_array_equal(table[2, 2], best[2, 0])
  assert jnp.all(table[2, jnp.array([0, 1, 3, 4])] < 0)


LEARNS = ["state"]  # from what was refused, by intention


@pytest.mark.parametrize(
  "shape, rules",
  [
    (draft_shape.chain(3), REJECTION),
    (TREE, REJECTION),
    slow(draft_shape.chain(0), REJECTION),
    slow(draft_shape.chain(3), None),
    slow(TREE, None),
  ],
  ids=["chain", "tree", "nothing", "chain, all rules", "tree, all rules"],
)
def test_conformance(shape, rules):
  """None: under every rule that fits."""
  stats = check_drafter(
    lambda: drafters.recycling(V, shape=shape),
    TABLE,
    TABLES,
    rules=rules,
    skip=LEARNS,
  )
  if shape.spec.max_depth:
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()


@pytest.mark.slow
def test_conformance_where_a_batch_decides():
  shape = draft_length.adaptive(3, [1.0, 1.2, 1.5, 1.8])
  check_drafter(
    lambda: drafters.recycling(V, shape=shape),
    TABLE,
    TABLES,
    rules=REJECTION,
    skip={*LEARNS, "rows", "slots"},
  )


@pytest.mark.parametrize("shape", [draft_shape.chain(3), slow(TREE)])
def test_no_copy_of_a_cache(shape):
  """Nor of the tables; chains have two widths."""
  target, params = learned_kinds.target()
  check_drafter(
    drafters.recycling(target.vocab_size, shape=shape),
    target,
    Params(params),
    rules=REJECTION,
    skip={*INVARIANTS} - {"coupled", "copies"},
  )


def test_planted_rows_that_share_a_table():
  drafter = drafters.recycling(V, shape=TREE)

  def update(*args):
    table = drafter.update(*args)
    return jnp.broadcast_to(jnp.max(table, axis=0), table.shape)

  broken("rows", drafter._replace(update=update), TABLE, TABLES)


def test_planted_a_table_that_sees_the_noise_to_come():
  """The successor of the pending token is the one that noise will draw."""
  drafter = drafters.recycling(V, 3)

  def propose(params, table, context):
    token = jnp.argmax(context.noise(1, 1), axis=-1)
    rows = jnp.arange(len(token))
    table = table.at[rows, context.pending[:, 0], 0].set(token)
    return drafter.propose(params, table, context)

  broken("drawn", drafter._replace(propose=propose), TABLE, TABLES)


@pytest.mark.parametrize(
  "shape, words",
  [
    (draft_shape.dynamic(2, 2, 3), "chains and static trees"),
    (draft_length.entropy(3), "drafts without a distribution"),
    (draft_shape.static([-1] + [0] * 9), "9 children, and there are 4"),
  ],
)
def test_refusals(shape, words):
  with pytest.raises(ValueError, match=words):
    drafters.recycling(4, shape=shape)


def test_recycling_prices_better_than_lookahead(capsys):
  """On every chip and batch of docs/roofline.md, whose Python this runs."""
  page = pathlib.Path(__file__).parents[1] / "docs" / "roofline.md"
  [code] = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
  exec(compile(code, page.name, "exec"), {})
  *lines, table = capsys.readouterr().out.splitlines()
  pairs = [re.findall(r"\d+\.\d\d", line) for line in lines]
  assert len(pairs) == 6
  for recycling, lookahead in pairs:
    assert 1 < float(recycling) < float(lookahead)
  assert table == f"table: {4 * 128256 * 3 / 2**20} MiB a row"
