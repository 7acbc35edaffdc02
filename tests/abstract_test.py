"""Drafters of shapes alone cost, hold and lower as loaded ones do."""

import dataclasses
import pathlib

import jax
import pytest

import programs
from specdec.benchmark import abstract
from specdec.benchmark.setup import Setup
from specdec.compiled import steps
from specdec.roofline import chips

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
BIGRAM = f"{EXAMPLES / 'bigram.py'}:bigram"


SETUP = Setup(
  drafter=BIGRAM,
  k=2,
  mesh="model:1",
  prompt_size=16,
  max_new_tokens=16,
  batch=2,
)


@pytest.fixture(scope="module")
def targets():
  return abstract.target(SETUP), SETUP.load_target()


@pytest.mark.parametrize(
  "drafter, shape, draft",
  [
    ("model(stdlib-1m)", "chain", True),
    ("early_exit(2)", "chains(2)", True),
    ("layer_skip(shipped)", "chain", True),
    ("quantized(group=32)", "chain", True),
    ("exit(recycle)", "chain", True),
    ("head(shared)", "chain", True),
    ("medusa(medusa)", "dynamic(6, top=2)", False),
    ("lookup(k=4) | eagle(eagle)", "chain", True),
    (BIGRAM, "chain", True),
    (f"{EXAMPLES / 'recent.py'}:recent", "chain", False),
    ("none", "chain", False),
  ],
)
def test_a_drafter_of_shapes_is_the_loaded_one_and_is_lowered(
  drafter, shape, draft, targets
):
  setup = dataclasses.replace(SETUP, drafter=drafter, shape=shape)
  target, loaded_target = (x._replace(drafts={}) for x in targets)
  ours = abstract.drafter(setup, target)
  for leaf in jax.tree.leaves((target.checkpoint.params, ours.params)):
    assert isinstance(leaf, jax.ShapeDtypeStruct)
  loaded = setup.make_drafter(loaded_target)
  assert ours.drafter.spec == loaded.drafter.spec
  assert ours.drafter.cost == loaded.drafter.cost
  shapes = [jax.tree.map(lambda x: x.shape, x.params) for x in (ours, loaded)]
  assert shapes[0] == shapes[1]
  lowered = abstract.steps(setup, target, ours)
  for name in ("draft", "verify", "accept"):
    lowered[name]()
  if drafter == "model(stdlib-1m)":
    lowered["prefill"](), lowered["loop"]()
    report, text = steps.compile_step(lowered["draft"])
    assert report["arguments"] > 0 and "HloModule" in text
  estimates = abstract.estimates(setup, target, ours, chips.get("v5e"))
  assert set(estimates) == {"verify"} | ({"draft"} if draft else set())
  assert estimates["verify"]["bytes"] > 0
  assert abstract.plan(setup, target, ours).parts["target"] > 0


def test_a_drafter_that_needs_a_tokenizer_is_refused_without_one(tmp_path):
  setup = Setup("preset:smollm2-135m", BIGRAM, k=2, random_weights=True)
  with pytest.raises(ValueError, match="bigram"):
    abstract.drafter(setup, abstract.target(setup))
  setup = Setup(str(programs.write_model(tmp_path)), BIGRAM, k=2)
  drafter, params = abstract.drafter(setup, abstract.target(setup))
  assert drafter.name == "bigram" and params.shape == (27, 27)
