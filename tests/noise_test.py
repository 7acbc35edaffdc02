"""Noise has an address: none that is uncoupled is ever used twice."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  noise,
  sampling,
)
from specdec.step import traverse_draft
from specdec.testing import table_model
from specdec.types import Draft, Params

V = 4
PARAMS = Params(
  table_model.init_params(jax.random.key(0), V),
  table_model.init_params(jax.random.key(1), V),
)
PROMPT = np.array([[0, 1, 2], [3, 0, 0], [1, 1, 0], [2, 3, 2]])
LENGTH = np.array([3, 1, 2, 3])


def generate(rule, drafter=None, *, rows=slice(None), max_length=12, **options):
  drafter = drafter or drafters.model(table_model.model(V), 3)
  prompt = options.pop("prompt", PROMPT)[rows]
  length = options.pop("length", LENGTH)[rows]
  temperature = options.pop("temperature", 1.0)
  return decode.generate(
    options.pop("target", None) or table_model.model(V),
    drafter,
    rule,
    options.pop("params", PARAMS),
    prompt,
    length,
    options.pop("key", jax.random.key(5)),
    max_length=max_length,
    sampling=sampling.settings(len(prompt), temperature),
    **options,
  )


@pytest.fixture
def record(monkeypatch):
  """Every (row key, address) that is folded while a program runs."""
  seen = []
  honest = noise.fold

  def note(keys, *address):
    for row, key in enumerate(keys):
      place = tuple(int(np.broadcast_to(x, len(keys))[row]) for x in address)
      seen.append((tuple(key.tolist()), place))

  def fold(keys, *address):
    jax.debug.callback(note, jax.random.key_data(keys), *address)
    return honest(keys, *address)

  monkeypatch.setattr(noise, "fold", fold)
  return seen


def recorded(record, rule, drafter=None):
  """One row at a time: a row that is done repeats its last round, unused."""
  parts = {
    "target": table_model.model(V),
    "drafter": drafter or drafters.model(table_model.model(V), 3),
  }
  for row in range(2):
    state = generate(
      rule, rows=slice(row, row + 1), index=jnp.array([row]), **parts
    )
    assert int(state.stats.rounds[0]) > 2
  jax.effects_barrier()
  return collections.Counter(record)


CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")
TREE = draft_shape.static([-1, 0, 0, 1, 1])


@pytest.mark.parametrize(
  "rule, shape",
  [
    (acceptance.rejection, None),
    (acceptance.block, None),
    (acceptance.kseq, CHAINS),
    (acceptance.rejection, TREE),
  ],
)
def test_b07_no_uncoupled_address_repeats(record, rule, shape):
  drafter = shape and drafters.model(table_model.model(V), shape=shape)
  counts = recorded(record, rule(), drafter)
  assert max(counts.values()) == 1
  streams = collections.Counter(place[0] for _, place in counts)
  assert set(streams) == {noise.DRAFT, noise.ACCEPT, noise.NEXT}
  assert len({key for key, _ in counts}) == 2


def test_coupled_noise_is_named_by_position_alone(record):
  counts = recorded(record, acceptance.coupled())
  assert {place[0] for _, place in counts} == {noise.COUPLED}
  assert {len(place) for _, place in counts} == {2}
  # The position of every token that was drafted or drawn, no prompt among them.
  key = next(iter(counts))[0]
  drawn = {place[1] for other, place in counts if other == key}
  assert min(drawn) >= LENGTH[0] - 1
  assert max(counts.values()) > 1  # drafter and target share


@pytest.mark.slow
def test_the_check_can_fail(record, monkeypatch):
  monkeypatch.setattr(noise, "NEXT", noise.DRAFT)
  counts = recorded(record, acceptance.rejection())
  assert max(counts.values()) > 1


def noise_of(rows=64, wanted=True, coupled=False, length=7):
  keys = noise.row_keys(jax.random.key(0), jnp.arange(rows))
  return noise.Noise(
    keys, jnp.full((rows,), length), V, coupled, jnp.array(wanted)
  )


def test_rows_nodes_streams_and_rounds_differ():
  @jax.jit
  def draw(length):
    n = noise_of(length=length)
    gumbels = [n.draft(d, d) for d in (1, 2)]
    gumbels += [n.next(jnp.full((64,), d)) for d in (0, 1)]
    return jnp.stack([*gumbels, n.at_position(n.length)]), n.accept(5)

  rounds = [draw(length) for length in (7, 8)]
  gumbels, uniforms = (np.stack(x).ravel() for x in zip(*rounds))
  assert len(np.unique(gumbels)) == len(gumbels)
  assert len(np.unique(uniforms)) == len(uniforms)
  assert uniforms.min() >= 0
  assert uniforms.max() < 1
  assert abs(uniforms.mean() - 0.5) < 0.05


@pytest.mark.parametrize("coupled", [False, True])
def test_a_frontier_is_its_nodes_one_by_one(coupled):
  @jax.jit
  def draw():
    n = noise_of(3, coupled=coupled)
    return n.draft(2, np.array([3, 4])), [n.draft(2, i) for i in (3, 4)]

  together, alone = draw()
  assert together.shape == (3, 2, V)
  np.testing.assert_array_equal(together, jnp.stack(alone, 1))
  same = np.array_equal(together[:, 0], together[:, 1])
  assert same == coupled  # a position has one vector, whatever the node


def test_greedy_batches_draw_nothing():
  assert not np.any(noise_of(wanted=False).draft(1, 1))


def test_keys_come_from_the_index():
  key = jax.random.key(0)
  rows = noise.row_keys(key, jnp.array([5, 2]))
  other = noise.row_keys(key, jnp.array([2, 9]))
  assert rows[1] == other[0]
  assert rows[0] != rows[1]


@pytest.fixture(scope="module")
def parts():
  """One target and one drafter, so that each batch size compiles once."""
  return table_model.model(V), drafters.model(table_model.model(V), 3)


RULES = {"rejection": acceptance.rejection(), "coupled": acceptance.coupled()}


def same_rows(a, b, rows_a, rows_b):
  for name in ("tokens", "length", "log_probs", "draft_log_probs", "origin"):
    np.testing.assert_array_equal(
      np.asarray(getattr(a, name))[rows_a], np.asarray(getattr(b, name))[rows_b]
    )
  for name in ("rounds", "drafted", "accepted", "nodes"):
    np.testing.assert_array_equal(
      np.asarray(getattr(a.stats, name))[rows_a],
      np.asarray(getattr(b.stats, name))[rows_b],
    )


@pytest.mark.parametrize("name", RULES)
def test_b20_b25_rows_are_independent(parts, name):
  target, drafter = parts
  rule, index = RULES[name], jnp.arange(4)
  options = {"target": target, "index": index}
  first = generate(rule, drafter, **options)
  order = np.array([2, 0, 3, 1])
  moved = generate(rule, drafter, rows=order, target=target, index=index[order])
  same_rows(first, moved, order, slice(None))

  # New neighbours, in text, length, noise and temperature: row 2 stays.
  neighbours = (PROMPT + 1) % V
  neighbours[2] = PROMPT[2]
  changed = generate(
    rule,
    drafter,
    prompt=neighbours,
    length=np.array([1, 3, LENGTH[2], 2]),
    target=target,
    index=jnp.array([7, 8, 2, 9]),
    temperature=np.array([0.0, 2.0, 1.0, 0.5]),
  )
  same_rows(first, changed, 2, 2)
  tokens = np.asarray(first.tokens)
  assert not np.array_equal(tokens[0], np.asarray(changed.tokens)[0])

  # Rows of one text and different indices differ.
  same = np.repeat(PROMPT[:1], 4, axis=0)
  spread = generate(rule, drafter, prompt=same, length=np.full(4, 3), **options)
  assert len({tuple(row) for row in np.asarray(spread.tokens)}) > 1


def test_b25_a_row_alone_is_a_row_of_a_batch(parts):
  target, drafter = parts
  together = generate(
    RULES["rejection"], drafter, target=target, index=jnp.arange(4)
  )
  for row in range(4):
    alone = generate(
      RULES["rejection"],
      drafter,
      rows=slice(row, row + 1),
      target=target,
      index=jnp.array([row]),
    )
    same_rows(together, alone, slice(row, row + 1), slice(None))


class Dice(NamedTuple):
  """Noise whose uniforms are all one number."""

  u: jax.Array

  def accept(self, num_nodes):
    return jnp.full((1, num_nodes), self.u)

  def next(self, node):
    return jnp.zeros((1, V))


def test_b08_the_edges_of_the_uniforms():
  """keep = 0 is refused even by u = 0; keep = 1 is kept by the largest u."""
  with np.errstate(divide="ignore"):
    target = jnp.asarray(np.log([[[0, 0.5, 0.5, 0]] * 2]), jnp.float32)
    drawn = jnp.asarray(np.log([[[0.5, 0.5, 0, 0]] * 2]), jnp.float32)

  @jax.jit
  def accepted(token, u):
    draft = Draft(
      jnp.stack([3, token])[None],
      np.array([-1, 0], np.int32),
      drawn,
      jnp.array([2]),
    )
    rule = acceptance.rejection()
    step = traverse_draft(rule, draft, target, target, Dice(u), 1)
    return step[1].num_accepted[0]

  for u in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
    assert accepted(0, u) == 0
    assert accepted(1, u) == 1


@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg", "threefry2x32"])
@pytest.mark.parametrize("typed", [True, False])
def test_any_keys_implementation_gives_rows_noise_of_their_own(name, typed):
  """rbg's vmapped draws fill a whole batch from the first row's key."""
  with jax.default_prng_impl(name):
    key = jax.random.key(5) if typed else jax.random.PRNGKey(5)
    together = generate(acceptance.rejection(), key=key)
    for row in range(4):
      alone = generate(
        acceptance.rejection(),
        rows=slice(row, row + 1),
        index=jnp.array([row]),
        key=key,
      )
      np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
