"""Slots that know nothing of a path are searched once for all its nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learned_kinds import (
  BATCH,
  K,
  V,
  draft_head,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  start,
  target,
  weights,
)
from specdec import draft_shape, drafters, step
from specdec.types import Params
from two_forms import REJECTION, drafter_of, slow

TOP = 6
WIDE = draft_shape.dynamic(TOP, K, TOP)  # DDTree's
DEEP = draft_shape.dynamic(2, K, 5)
LIKELIEST = draft_shape.static([-1, 0, 0, 1, 1, 2, 3], "deterministic")
DRAWN = draft_shape.static([-1, 0, 0, 1, 1, 2, 3])


def searched_each(shape):
  """The same shape; every node of a level has its own copy of the logits."""

  def sample_tree(context, logits, run, *rest):
    def copied(carry, tokens, *nodes):
      carry, after = run(carry, tokens, *nodes)
      if after is not None:
        after = jnp.broadcast_to(after, (*tokens.shape, V))
      return carry, after

    return shape.sample_tree(context, logits, copied, *rest)

  return shape._replace(sample_tree=sample_tree)


def proposing(drafter):
  """(draft's weights, state) -> the draft of a round."""

  def propose(draft, state):
    context = step.context_of(state, V, REJECTION)
    params = Params(target()[1], draft)
    return drafter.propose(params, state.draft_state, context)[0]

  return jax.jit(propose)


@pytest.mark.parametrize(
  "kind, shape",
  [
    slow("dflash", WIDE),
    ("peagle", WIDE),
    ("dflash", LIKELIEST),
    slow("dflash", DEEP),
    slow("peagle", DEEP),
    slow("windowed", WIDE),
    slow("dflash", DRAWN),
    slow("peagle", DRAWN),
  ],
)
def test_a_search_for_all_nodes_finds_what_one_for_each_does(kind, shape):
  each = drafters.from_head(draft_head(kind), target()[0], searched_each(shape))
  once = drafter_of(kind, shape)
  theirs, ours = (
    speculate(x, REJECTION, weights(kind), np.ones(BATCH)) for x in (each, once)
  )
  np.testing.assert_array_equal(ours.tokens, theirs.tokens)
  np.testing.assert_array_equal(ours.stats.accepted, theirs.stats.accepted)
  assert ours.stats.accepted.sum() > 0
  middle = speculate(once, REJECTION, weights(kind), np.ones(BATCH), most=4)
  drafts = (proposing(x)(weights(kind), middle) for x in (each, once))
  jax.tree.map(np.testing.assert_array_equal, *drafts)


@pytest.mark.parametrize(
  "kind, once",
  [("dflash", True), ("peagle", True), ("dspark", False), ("dflash2", False)],
)
def test_a_program_holds_logits_of_slots_or_else_of_nodes(kind, once):
  drafter, draft = drafter_of(kind, WIDE), weights(kind)
  state = start(drafter, REJECTION, draft=draft)
  text = proposing(drafter).lower(draft, state).as_text()
  assert f"tensor<{BATCH}x1x{V}xf32>" in text
  extended = TOP - 1  # of the first level; no other dimension
  assert (f"tensor<{BATCH}x{extended}x{V}xf32>" in text) == (not once)
