"""Parts that do not fit together are refused, in words."""

import jax
import numpy as np
import pytest

from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.testing import table_model
from specdec.types import Params

V = 5
PROMPT = np.zeros((2, 9), int)
TARGET = table_model.model(V)
coupled, rejection, kseq = (
  acceptance.coupled, acceptance.rejection, acceptance.kseq,
)  # fmt: skip


def arguments(draft_vocabulary=V, max_length=12):
  key = jax.random.key(0)
  sizes = V, draft_vocabulary
  params = Params(*(table_model.init_params(key, size) for size in sizes))
  options = {"max_length": max_length, "sampling": sampling.settings(2, 1.0)}
  return (params, PROMPT, np.full(2, 9), key), options


def check_refused(drafter, rule, sentence, draft_vocabulary=V):
  positional, options = arguments(draft_vocabulary)
  with pytest.raises(ValueError, match=sentence):
    decode.generate(TARGET, drafter, rule, *positional, **options)


def of_spec(drafter, **changes):
  return drafter._replace(spec=drafter.spec._replace(**changes))


def of_tree(shape):
  return drafters.model(TARGET, shape=shape)


@pytest.mark.parametrize("size", [V - 1, V + 1])
def test_b23_two_vocabularies_are_refused(size):
  drafter, rule = drafters.model(table_model.model(size), 2), rejection()
  check_refused(drafter, rule, "share one vocabulary", size)


@pytest.mark.parametrize("widths", [(), (2,), (3, 1), (0, 3), (1, 1, 3)])
def test_widths_that_make_no_sense_are_refused(widths):
  drafter = of_spec(drafters.lookup(2), widths=widths)
  check_refused(drafter, coupled(), "widths = ")


TREE = draft_shape.static(draft_tree.parallel(2, 2), "iid")
UNREPEATED = draft_shape.static(draft_tree.parallel(2, 2))
DYNAMIC = draft_shape.dynamic(2, 2, 4)
PICKY = rejection()._replace(siblings=frozenset({"iid"}))


@pytest.mark.parametrize(
  "drafter, rule, sentence",
  [
    (drafters.lookup(2), PICKY, "rejection is right for iid"),
    (
      drafters.lookup(2),
      kseq(),
      "reads the distribution that each draft token",
    ),
    (of_tree(DYNAMIC), kseq(), "reads the distribution"),
    (of_tree(TREE), acceptance.block(), "drafts trees"),
    (of_tree(TREE), acceptance.lenience(0.5), "drafts trees"),
    (of_tree(UNREPEATED), kseq(), "kseq is right for iid, none"),
  ],
)
def test_rules_and_shapes_that_do_not_fit_are_refused(drafter, rule, sentence):
  check_refused(drafter, rule, sentence)


@pytest.mark.parametrize(
  "drafter, siblings",
  [
    (drafters.lookup(2), "none"),
    (drafters.model(TARGET, 2), "deterministic"),
  ],
)
def test_b11_a_distribution_that_the_spec_does_not_promise_is_refused(
  drafter, siblings
):
  """A spec says whether draft tokens have a distribution."""
  drafter = of_spec(drafter, siblings=siblings)
  check_refused(drafter, rejection(), "and its spec says siblings = ")


def test_a_prompt_longer_than_the_buffer_is_refused():
  positional, options = arguments(max_length=8)
  with pytest.raises(ValueError, match="max_length must be at least as long"):
    decode.autoregress(TARGET, *positional, **options)


def test_a_draft_with_more_nodes_than_the_cache_has_room_for_is_refused():
  small, large = (drafters.lookup(k) for k in (2, 40))
  positional, options = arguments()
  state = decode.start(TARGET, small, coupled(), *positional, **options)
  rest = positional[0], state, np.zeros((0,), np.int32)
  with pytest.raises(ValueError, match="a draft of 41 nodes need 53"):
    decode.run(TARGET, large, coupled(), *rest)


@pytest.mark.parametrize(
  "build, sentence",
  [
    (lambda: draft_shape.dynamic(0, 2, 1), "top = 0"),
    (lambda: draft_shape.dynamic(2, 0, 1), "depth = 0"),
    (lambda: draft_shape.dynamic(2, 2, 7), "have 1 to 6 draft tokens"),
    (lambda: draft_shape.dynamic(2, 2, 0), "size = 0"),
    (lambda: draft_tree.parallel(0, 2), "there must be a chain"),
    (lambda: draft_tree.parallel(2, 2, 3), "share 3"),
    (lambda: draft_shape.static([-1, 2, 0]), "stands before its parent"),
    (lambda: draft_shape.static([0, 0]), "the root"),
  ],
)
def test_impossible_shapes_are_refused(build, sentence):
  with pytest.raises(ValueError, match=sentence):
    build()
