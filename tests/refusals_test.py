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


def arguments(draft_vocabulary=V, max_length=12):
  params = Params(
    *(
      table_model.init_params(jax.random.key(0), size)
      for size in (V, draft_vocabulary)
    )
  )
  positional = (params, PROMPT, np.full(2, 9), jax.random.key(0))
  settings = sampling.settings(2, 1.0)
  return positional, {"max_length": max_length, "sampling": settings}


@pytest.mark.parametrize("size", [V - 1, V + 1])
def test_b23_two_vocabularies_are_refused(size):
  positional, options = arguments(size)
  drafter = drafters.model(table_model.model(size), 2)
  with pytest.raises(ValueError, match="share one vocabulary"):
    decode.generate(
      table_model.model(V),
      drafter,
      acceptance.rejection(),
      *positional,
      **options,
    )


def test_siblings_that_the_rule_does_not_know_are_refused():
  positional, options = arguments()
  picky = acceptance.rejection()._replace(siblings=frozenset({"iid"}))
  with pytest.raises(ValueError, match="rejection is right for iid"):
    decode.generate(
      table_model.model(V), drafters.lookup(2), picky, *positional, **options
    )


def test_a_prompt_longer_than_the_buffer_is_refused():
  positional, options = arguments(max_length=8)
  with pytest.raises(ValueError, match="max_length must be at least as long"):
    decode.autoregress(table_model.model(V), *positional, **options)


@pytest.mark.parametrize("widths", [(), (2,), (3, 1), (0, 3), (1, 1, 3)])
def test_widths_that_make_no_sense_are_refused(widths):
  positional, options = arguments()
  drafter = drafters.lookup(2)
  drafter = drafter._replace(spec=drafter.spec._replace(widths=widths))
  with pytest.raises(ValueError, match="widths = "):
    decode.generate(
      table_model.model(V),
      drafter,
      acceptance.coupled(),
      *positional,
      **options,
    )


TREE = draft_shape.static(draft_tree.parallel(2, 2), "iid")


@pytest.mark.parametrize(
  "make, rule, sentence",
  [
    (
      lambda: drafters.lookup(2),
      "kseq",
      "reads the distribution that each draft token",
    ),
    (
      lambda: tree_of(draft_shape.dynamic(2, 2, 4)),
      "kseq",
      "reads the distribution",
    ),
    (lambda: tree_of(TREE), "block", "drafts trees"),
    (lambda: tree_of(TREE), "lenience", "drafts trees"),
    (
      lambda: tree_of(draft_shape.static(draft_tree.parallel(2, 2))),
      "kseq",
      "kseq is right for iid, none",
    ),
  ],
)
def test_rules_and_shapes_that_do_not_fit_are_refused(make, rule, sentence):
  rules = {
    "kseq": acceptance.kseq(),
    "block": acceptance.block(),
    "lenience": acceptance.lenience(0.5),
  }
  positional, options = arguments()
  with pytest.raises(ValueError, match=sentence):
    decode.generate(
      table_model.model(V), make(), rules[rule], *positional, **options
    )


def tree_of(expansion):
  return drafters.model(table_model.model(V), shape=expansion)


@pytest.mark.parametrize("siblings", ["none", "deterministic"])
def test_a_distribution_that_the_spec_does_not_promise_is_refused(siblings):
  """B11: a drafter says in its spec whether its draft tokens have a
  distribution.
  """
  positional, options = arguments()
  honest = (
    drafters.lookup(2)
    if siblings == "none"
    else drafters.model(table_model.model(V), 2)
  )
  liar = honest._replace(spec=honest.spec._replace(siblings=siblings))
  with pytest.raises(ValueError, match="and its spec says siblings = "):
    decode.generate(
      table_model.model(V), liar, acceptance.rejection(), *positional, **options
    )


def test_a_draft_with_more_nodes_than_the_cache_has_room_for_is_refused():
  positional, options = arguments()
  params = positional[0]
  small, large = (drafters.lookup(k) for k in (2, 40))
  rule = acceptance.coupled()
  state = decode.start(
    table_model.model(V), small, rule, *positional, **options
  )
  with pytest.raises(ValueError, match="a draft of 41 nodes need 53"):
    decode.run(
      table_model.model(V), large, rule, params, state, np.zeros((0,), np.int32)
    )


@pytest.mark.parametrize(
  "build, sentence",
  [
    (lambda: draft_shape.dynamic(0, 2, 1), "top = 0"),
    (lambda: draft_shape.dynamic(2, 0, 1), "depth = 0"),
    (lambda: draft_shape.dynamic(2, 2, 7), "have 1 to 6 draft tokens"),
    (lambda: draft_shape.dynamic(2, 2, 0), "size = 0"),
    (lambda: draft_tree.parallel(0, 2), "there must be a chain"),
    (lambda: draft_tree.parallel(2, 2, 3), "share 3"),
    (lambda: draft_shape.static([-1, 0, 1, 0]), "not in level order"),
    (lambda: draft_shape.static([-1, 2, 0]), "stands before its parent"),
    (lambda: draft_shape.static([0, 0]), "the root"),
  ],
)
def test_shapes_that_cannot_be_are_refused(build, sentence):
  with pytest.raises(ValueError, match=sentence):
    build()
