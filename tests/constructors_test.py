"""Constructors give one object for equal arguments: a loop compiles once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  acceptance,
  decode,
  draft_shape,
  drafters,
  sampling,
  step,
)
from specdec.models import transformer
from specdec.testing import table_model
from specdec.types import Params, Skip
from specdec.utils.constructors import cached

V = 7


def test_a_loop_that_constructs_its_drafter_compiles_once(monkeypatch):
  traced = chex.assert_max_traces(step.decode_step, n=1)
  monkeypatch.setattr(step, "decode_step", traced)
  params = Params(table_model.init_params(jax.random.key(0), V))
  for seed in range(10):
    decode.generate(
      table_model.model(V),
      drafters.lookup(k=4, ngram=2, min_ngram=2),
      acceptance.coupled(),
      params,
      jnp.ones((1, 5), int),
      jnp.array([5]),
      jax.random.key(seed),
      max_length=19,
      sampling=sampling.settings(1, 1.0),
    )


@pytest.mark.parametrize(
  "construct",
  [  # of drafters, check_drafter asks it
    lambda: drafters.model(
      table_model.model(V), shape=draft_shape.static(np.array([-1, 0, 0]))
    ),
    lambda: drafters.layer_skip(
      learned_kinds.target()[0], Skip([1], (0,)), 3, drafters.Threshold(0.3)
    ),
    lambda: transformer.model(learned_kinds.TARGET),
    *(getattr(acceptance, name) for name in ("block", "coupled", "greedy")),
    *(getattr(acceptance, name) for name in ("kseq", "naive", "rejection")),
    lambda: acceptance.lenience(0.5),
    lambda: acceptance.typical(delta=0.2),
    lambda: acceptance.relaxed(3, 0.1),
    lambda: acceptance.synthetic([0.5, 0.2]),
  ],
)
def test_equal_arguments_give_equal_objects(construct):
  one, other = construct(), construct()
  assert one == other and hash(one) == hash(other)


def test_arguments_are_compared_by_value():
  calls = []

  @cached
  def construct(a, b=(1, 2), *, c=None):
    calls.append((a, b, c))
    return object()

  same = construct(1)
  assert construct(a=1) is same
  assert construct(1, [1, 2], c=None) is same
  for other in ((1.0,), (True,), (1, (1, 3)), (1, np.array([1, 2]))):
    assert construct(*other) is not same
  assert construct(1, np.array([1, 2])) is construct(1, np.array([1, 2]))
  assert len(calls) == 5
  with pytest.raises(TypeError, match="d"):
    construct(1, d=2)
