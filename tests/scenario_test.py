"""Scenario prices what calls name, as pairs built by hand."""

import dataclasses
import pathlib

import pytest

from specdec.benchmark.scenario import Scenario, find_chip
from specdec.checkpoints import learned, shipped
from specdec.drafters.heads.cost import drafter_cost as head_cost
from specdec.models import presets
from specdec.roofline import chips, shapes
from specdec.roofline.cost import TYPICAL, Deployment
from specdec.roofline.pairs import TargetDraftPair
from specdec.types import DrafterCost, Skip

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
CHIP = chips.get("v6e")
LARGE = Deployment(
  shapes.get("llama3-8b"), CHIP, ways=2, replicas=2, efficiency=TYPICAL
)


def large(drafter, **settings):
  return Scenario(
    "llama3-8b", drafter, CHIP, ways=2, replicas=2, **settings
  ).pair


def shipped_target(drafter, **settings):
  return Scenario("stdlib-11m", drafter, chips.get("v5e"), **settings)


def assert_equal(ours: TargetDraftPair, expected: TargetDraftPair):
  for k in (0, 3):
    assert ours.round(5, k, 700) == expected.round(5, k, 700)
  assert ours.memory(5, 700) == expected.memory(5, 700)


def test_pairs_of_every_kind():
  draft = dataclasses.replace(LARGE, shape=shapes.get("llama3-1b"))
  assert_equal(large("model(llama3-1b)"), TargetDraftPair(LARGE, draft))
  alone = dataclasses.replace(draft, ways=1)
  assert_equal(
    large("model(llama3-1b)", draft_ways=1), TargetDraftPair(LARGE, alone)
  )
  share = dataclasses.replace(LARGE, shape=shapes.scaled(LARGE.shape, 0.03))
  assert_equal(large("model(0.03)"), TargetDraftPair(LARGE, share))
  first = dataclasses.replace(LARGE, stop=8)
  assert_equal(
    large("early_exit(8)"),
    TargetDraftPair(LARGE, first, drafter=DrafterCost(exit_layer=8)),
  )
  config = presets.get("llama3-8b", "bfloat16")
  less = shapes.of_config(config, skip=Skip((3,), (5,)))
  assert_equal(
    large("layer_skip(attention=[3], mlp=[5])"),
    TargetDraftPair(LARGE, drafter=DrafterCost(shape=less, shares_target=True)),
  )
  assert_equal(large("lookup"), TargetDraftPair(LARGE))
  assert_equal(
    large("lookup(k=4) | model(llama3-1b)"), TargetDraftPair(LARGE, draft)
  )


@pytest.mark.parametrize("name", ["eagle", "medusa", "prophet", "recycle"])
def test_a_head_costs_what_its_file_says(name):
  scenario = shipped_target(f"head({name})", most=3)
  file = learned.load(shipped.drafter(name))
  expected = head_cost(file.draft_head(scenario.config), scenario.config)
  assert scenario.cost == expected
  if name == "eagle":  # it reads half of the projection's bytes in int8
    half = shipped_target(f"head({name})", weights="int8").cost.step
    assert half.target_bytes == expected.step.target_bytes / 2
    both = shipped_target(f"lookup(k=4) | {name}({name})")
    assert both.cost == expected
  assert scenario.pair.round(1, 3, 100).seconds > 0


def test_a_drafter_of_somebodys_own():
  recent = shipped_target(f"{EXAMPLES / 'recent.py'}:recent")
  assert recent.cost.row_bytes == 4 * 4096
  bigram = shipped_target(f"{EXAMPLES / 'bigram.py'}:bigram")
  parts = [name for name, _, _ in bigram.pair.round(1, 2, 100).parts]
  assert parts == ["draft, 1 token", "target, 3 tokens"]


def test_what_has_no_cost_is_refused(tmp_path):
  file = tmp_path / "mine.py"
  text = (EXAMPLES / "recent.py").read_text()
  file.write_text(text.replace("propose, update, cost)", "propose, update)"))
  with pytest.raises(ValueError, match=r"mine\.py:recent has no cost"):
    shipped_target(f"{file}:recent").pair  # noqa: B018


@pytest.mark.parametrize(
  "drafter, sentence",
  [
    ("none", "none drafts nothing"),
    ("early_exit(6)", "this target has 6 layers"),
    ("early_exit(2) | lookup", "the first drafter must be deterministic"),
    ("lookup | lookup | lookup", "at most two drafters"),
    ("model(stdlib-1m, k=3)", "leave k out"),
    ("model(stdlib-1m, size=3)", r"it is model\(name\)"),
    (
      "layer_skip(attention=[1], threshold=0.5)",
      r"give layer_skip\(attention=\[1\], mlp=\[\]\)",
    ),
    ("nonsense", "did you mean none"),
  ],
)
def test_what_cannot_be_priced_is_refused(drafter, sentence):
  with pytest.raises(ValueError, match=sentence):
    shipped_target(drafter).pair  # noqa: B018


def test_a_shape_without_a_config_has_few_drafters():
  t5 = Scenario("t5-xxl", "early_exit(4)", CHIP, source=100)
  assert t5.pair.draft.stop == 4
  with pytest.raises(ValueError, match="t5-xxl is a shape: take model"):
    Scenario("t5-xxl", "layer_skip(attention=[1])", CHIP).pair  # noqa: B018
  with pytest.raises(ValueError, match="24 layers"):
    Scenario("t5-xxl", "early_exit(24)", CHIP).pair  # noqa: B018


def test_numbers_replace_a_datasheets():
  assert find_chip("v5e", {"bandwidth": 1e12}).bandwidth == 1e12
