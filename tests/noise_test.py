"""Noise has an address: none that is uncoupled is ever used twice."""

import collections
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, draft_shape, draft_tree, drafters, noise
from specdec.step import traverse_draft
from specdec.types import Draft
from table_loop import LENGTH, MODEL, V, generate, record

__all__ = ["record"]  # a fixture


def recorded(record, rule, drafter=None):
  """One row at a time: a row that is done repeats its last round, unused."""
  for row in range(2):
    state = generate(
      rule, drafter, rows=slice(row, row + 1), index=jnp.array([row])
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
  drafter = shape and drafters.model(MODEL, shape=shape)
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


def test_greedy_batches_draw_nothing():
  assert not np.any(noise_of(wanted=False).draft(1, 1))


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


@pytest.mark.parametrize("rule", [acceptance.rejection(), acceptance.coupled()])
def test_b20_b25_rows_are_independent(rule):
  """Of their place, their neighbours' indices and the batch size;
  `check_drafter` changes the neighbours.
  """
  together = generate(rule, index=jnp.arange(4))
  order = np.array([2, 0, 3, 1])
  moved = generate(rule, rows=order, index=jnp.asarray(order))
  same_rows(together, moved, order, slice(None))
  alone = generate(rule, rows=slice(1, 2), index=jnp.array([1]))
  same_rows(together, alone, [1], slice(None))
  other = generate(rule, index=jnp.array([0, 7, 2, 3]))
  same_rows(together, other, [0, 2, 3], [0, 2, 3])
  assert np.any(other.tokens[1] != together.tokens[1])


@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg", "threefry2x32"])
@pytest.mark.parametrize("typed", [True, False])
def test_b25_a_row_alone_is_a_row_of_a_batch(name, typed):
  """Whatever the key's implementation: rbg's vmapped draws fill a whole batch
  from the first row's key.
  """

  def draws(index):
    keys = noise.row_keys(key, jnp.asarray(index))
    n = noise.Noise(keys, jnp.full(len(index), 7), V, coupled=False)
    return np.hstack(
      [n.draft(1, 1), n.next(jnp.zeros(len(index))), n.accept(3)]
    )

  index = np.array([5, 2, 7])
  with jax.default_prng_impl(name):
    key = jax.random.key(5) if typed else jax.random.PRNGKey(5)
    together = draws(index)
    alone = [draws(index[row : row + 1])[0] for row in range(3)]
  np.testing.assert_array_equal(together, alone)
  assert len(np.unique(together)) == together.size


class Constant(NamedTuple):
  """Noise whose uniforms are all one number."""

  u: jax.Array

  def accept(self, num_nodes):
    return jnp.full((1, num_nodes), self.u)

  def next(self, node):
    return jnp.zeros((1, V))


def test_b08_the_edges_of_the_uniforms():
  """accept_prob 0 refuses even at u = 0; 1 accepts at the largest u."""
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
    step = traverse_draft(rule, draft, target, target, Constant(u), 1)
    return step[1].num_accepted[0]

  for u in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
    assert accepted(0, u) == 0
    assert accepted(1, u) == 1
