"""Drafters of shapes alone cost and hold what loaded ones do."""

import pathlib

import jax
import pytest

import programs
from specdec.benchmark import abstract
from specdec.benchmark.setup import Setup

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
BIGRAM = f"{EXAMPLES / 'bigram.py'}:bigram"


@pytest.mark.parametrize(
  "drafter",
  [
    "lookup",
    "early_exit(1)",
    "layer_skip(attention=[1])",
    "model(stdlib-1m)",
    "head(shared)",
    "prophet(prophet)",
    "lookup(k=4) | eagle(eagle)",
    f"{EXAMPLES / 'recent.py'}:recent",
    BIGRAM,
  ],
)
def test_a_drafter_without_weights_is_the_loaded_one(drafter):
  setup = Setup(drafter=drafter, k=2)
  target = abstract.target(setup)
  ours = abstract.drafter(setup, target)
  for leaf in jax.tree.leaves((target.checkpoint.params, ours.params)):
    assert isinstance(leaf, jax.ShapeDtypeStruct)
  loaded = setup.make_drafter(setup.load_target(packed=False))
  assert ours.drafter.spec == loaded.drafter.spec
  assert ours.drafter.cost == loaded.drafter.cost
  counts = [
    sum(x.size for x in jax.tree.leaves(x.params)) for x in (ours, loaded)
  ]
  assert counts[0] <= counts[1]  # packing pads


def test_a_drafter_that_needs_a_tokenizer_is_refused_without_one(tmp_path):
  setup = Setup("preset:smollm2-135m", BIGRAM, k=2, random_weights=True)
  with pytest.raises(ValueError, match="bigram"):
    abstract.drafter(setup, abstract.target(setup))
  setup = Setup(str(programs.write_model(tmp_path)), BIGRAM, k=2)
  drafter, params = abstract.drafter(setup, abstract.target(setup))
  assert drafter.name == "bigram" and params.shape == (27, 27)
