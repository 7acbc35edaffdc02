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


def with_spec(drafter, **changes):
  return drafter._replace(spec=drafter.spec._replace(**changes))


def of_shape(shape):
  return drafters.model(TARGET, shape=shape)


def with_deterministic_children(children):
  shape = draft_shape.static(draft_tree.parallel(children, 1), "deterministic")
  positional, options = arguments()
  decode.generate(TARGET, of_shape(shape), coupled(), *positional, **options)


IID = of_shape(draft_shape.static(draft_tree.parallel(2, 2), "iid"))
UNREPEATED = of_shape(draft_shape.static(draft_tree.parallel(2, 2)))
DYNAMIC = of_shape(draft_shape.dynamic(2, 2, 4))
LOOKUP = drafters.lookup(2)


@pytest.mark.parametrize(
  "drafter, rule, sentence",
  [
    *(
      (with_spec(LOOKUP, widths=widths), coupled(), "widths = ")
      for widths in ((), (2,), (3, 1), (0, 3), (1, 1, 3))
    ),
    (
      LOOKUP,
      rejection()._replace(siblings=frozenset({"iid"})),
      "rejection is right for iid",
    ),
    (LOOKUP, kseq(), "reads the distribution that each draft token"),
    (DYNAMIC, kseq(), "reads the distribution"),
    (IID, acceptance.block(), "drafts trees"),
    (IID, acceptance.lenience(0.5), "drafts trees"),
    (UNREPEATED, kseq(), "kseq is right for iid, none"),
    # A forgotten `siblings` would be taken for a chain's.
    (with_spec(IID, siblings="none"), kseq(), "have several children"),
    (with_spec(UNREPEATED, siblings="none"), kseq(), "several children"),
    (with_spec(IID, parents=(-1, 0, 1, 0, 3)), kseq(), "not in level order"),
    (with_spec(IID, parents=(-1, -1, 0, 1, 1)), kseq(), "tree of .* parent -1"),
  ],
)
def test_rules_and_drafts_that_do_not_fit_are_refused(drafter, rule, sentence):
  positional, options = arguments()
  with pytest.raises(ValueError, match=sentence):
    decode.generate(TARGET, drafter, rule, *positional, **options)


@pytest.mark.parametrize("eos_ids", [2, [[2]]])
def test_eos_ids_are_a_list(eos_ids):
  positional, options = arguments()
  with pytest.raises(ValueError, match="eos_ids must be a list of token ids"):
    decode.generate(
      TARGET, LOOKUP, coupled(), *positional, eos_ids=eos_ids, **options
    )


def test_a_stream_is_refused_when_it_is_asked_for():
  positional, options = arguments()
  with pytest.raises(ValueError, match="every = 0"):
    decode.stream(TARGET, LOOKUP, coupled(), *positional, every=0, **options)


@pytest.mark.parametrize("size", [V - 1, V + 1])
def test_b23_two_vocabularies_are_refused(size):
  positional, options = arguments(size)
  drafter = drafters.model(table_model.model(size), 2)
  with pytest.raises(ValueError, match="share one vocabulary"):
    decode.generate(TARGET, drafter, rejection(), *positional, **options)


@pytest.mark.parametrize(
  "drafter, siblings",
  [(LOOKUP, "none"), (drafters.model(TARGET, 2), "deterministic")],
)
def test_b11_a_distribution_that_the_spec_does_not_promise_is_refused(
  drafter, siblings
):
  drafter = with_spec(drafter, siblings=siblings)
  positional, options = arguments()
  with pytest.raises(ValueError, match="and its spec says siblings = "):
    decode.generate(TARGET, drafter, rejection(), *positional, **options)


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
    (lambda: with_deterministic_children(V + 1), "6 children of one node"),
    (lambda: draft_tree.parallel(0, 2), "there must be a chain"),
    (lambda: draft_tree.parallel(2, 2, 3), "share 3"),
    (lambda: draft_shape.static([-1, 2, 0]), "stands before its parent"),
    (lambda: draft_shape.static([0, 0]), "the root"),
  ],
)
def test_impossible_shapes_are_refused(build, sentence):
  with pytest.raises(ValueError, match=sentence):
    build()
