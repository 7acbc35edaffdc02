"""Scenario prices what calls name, as pairs built by hand."""

import dataclasses
import pathlib
from types import SimpleNamespace

import pytest

from specdec import checkpoints
from specdec.benchmark import deployments
from specdec.benchmark.scenario import Scenario
from specdec.benchmark.setup import Setup
from specdec.checkpoints import learned, shipped
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads.cost import drafter_cost as head_cost
from specdec.models import presets
from specdec.roofline import chips, drafter_cost, shapes
from specdec.roofline.cost import TYPICAL, Deployment
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import NO_COST, DrafterCost, Skip

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
CHIP = chips.get("v6e")
LARGE = Deployment(
  shapes.get("llama3-8b"), CHIP, ways=2, replicas=2, efficiency=TYPICAL
)
MODEL = drafter_cost.model(shapes.get("llama3-1b"))
PARD = drafter_cost.pard(shapes.get("llama3-1b"))
SKIP = drafter_cost.layer_skip(
  presets.get("llama3-8b", "bfloat16"), Skip((3,), (5,))
)


def shipped_target(drafter, **settings):
  return Scenario.of("stdlib-11m", drafter, chips.get("v5e"), **settings)


@pytest.mark.parametrize(
  "drafter, cost",
  [
    ("model(llama3-1b)", MODEL),
    ("model(0.03)", drafter_cost.model(shapes.scaled(LARGE.shape, 0.03))),
    ("pard(llama3-1b)", PARD),
    ("early_exit(8)", DrafterCost(exit_layer=8)),
    ("layer_skip(attention=[3], mlp=[5])", SKIP),
    ("lookup", NO_COST),
    ("lookup(k=4) | model(llama3-1b)", MODEL),
  ],
)
def test_a_call_is_priced_as_its_drafter_cost(drafter, cost):
  pair = Scenario.of("llama3-8b", drafter, CHIP, ways=2, replicas=2).pair
  expected = TargetDraftPair(LARGE, cost)
  for k in (0, 3):
    assert pair.round(5, k, 700) == expected.round(5, k, 700)
  assert pair.memory(5, 700) == expected.memory(5, 700)


def test_a_draft_model_may_have_other_chips():
  deployment = {"ways": 2, "replicas": 2}
  ours = Scenario.of(
    "llama3-8b", "model(llama3-1b)", CHIP, draft_ways=1, **deployment
  )
  alone = dataclasses.replace(LARGE, shape=MODEL.shape, ways=1)
  assert ours.pair.draft == alone
  expected = TargetDraftPair(LARGE, MODEL, alone)
  assert ours.pair.round(5, 3, 700) == expected.round(5, 3, 700)


def test_a_draft_model_is_held_as_its_call_says():
  def cost(call):
    return Scenario.of("llama3-8b", call, CHIP).cost

  whole = cost("model(llama3-1b)")
  small = cost("model(llama3-1b, weights=int8(group=64), kv=int8)")
  assert small.weight_bytes == (1 + 4 / 64) / 2 * whole.weight_bytes
  assert small.position_bytes < 0.6 * whole.position_bytes
  assert small.shape.weight_size == 1 + 4 / 64


@pytest.mark.parametrize("name", ["eagle", "recycle"])
def test_a_head_costs_what_its_file_says(name):
  scenario = shipped_target(f"head({name})", most=3)
  file = learned.load(shipped.drafter(name))
  config = checkpoints.inspect(fetch("stdlib-11m"), "bfloat16")
  expected = head_cost(file.draft_head(config), config)
  assert scenario.cost == expected
  if name == "eagle":  # it reads half of the projection's bytes in int8
    half = shipped_target(f"head({name})", weights="int8").cost.step
    assert half.target_bytes == expected.step.target_bytes / 2
    both = shipped_target(f"lookup(k=4) | {name}({name})")
    assert both.cost == expected
  assert scenario.pair.round(1, 3, 100).seconds > 0


def test_a_drafter_of_somebodys_own(tmp_path):
  recent = shipped_target(f"{EXAMPLES / 'recent.py'}:recent")
  assert recent.cost.row_bytes == 4 * 4096
  bigram = shipped_target(f"{EXAMPLES / 'bigram.py'}:bigram")
  parts = [name for name, _, _ in bigram.pair.round(1, 2, 100).parts]
  assert parts == ["draft, 1 token", "target, 3 tokens"]
  file = tmp_path / "mine.py"
  text = (EXAMPLES / "recent.py").read_text()
  file.write_text(text.replace("propose, update, cost)", "propose, update)"))
  with pytest.raises(ValueError, match=r"mine\.py:recent has no cost"):
    shipped_target(f"{file}:recent").pair  # noqa: B018


THRESHOLD = "layer_skip(attention=[1], threshold=0.5)"


@pytest.mark.parametrize(
  "target, drafter, sentence",
  [
    ("stdlib-11m", "none", "none drafts nothing"),
    ("stdlib-11m", "early_exit(6)", "this target has 6 layers"),
    ("stdlib-11m", "early_exit(2) | lookup", "first drafter must be determ"),
    ("stdlib-11m", "lookup | lookup | lookup", "at most two drafters"),
    ("stdlib-11m", "model(stdlib-1m, k=3)", "leave k out"),
    ("stdlib-11m", "model(stdlib-1m, size=3)", r"it is model\(name"),
    ("stdlib-11m", f"lookup(k=2) | {THRESHOLD}", r"\(attention=\[1\], mlp=\["),
    ("stdlib-11m", "nonsense", "did you mean none"),
    ("deepseek-v3", "early_exit(61)", "61 layers"),
    ("gpt-5", "lookup", "no model 'gpt-5'"),
    ("0.5", "lookup", "target 0.5 is a share of itself; give"),
  ],
)
def test_what_cannot_be_priced_is_refused(target, drafter, sentence):
  with pytest.raises(ValueError, match=sentence):
    Scenario.of(target, drafter, CHIP).pair  # noqa: B018


@pytest.mark.parametrize(
  "drafter",
  [
    "layer_skip(shipped)",
    "layer_skip(mlp=[1,3],attention=[1,3,4,5])",
    "lookup(k=2) | layer_skip(shipped)",
  ],
)
def test_a_calibration_names_layers_that_are_skipped(drafter):
  layers = "layer_skip(attention=[1, 3, 4, 5], mlp=[1, 3])"
  rest, _, _ = drafter.partition("layer_skip")
  setting = deployments.setting_of(Setup("stdlib-11m", drafter))
  assert setting == f"stdlib-11m, {rest}{layers}, coupled, greedy"
  other = setting.replace("mlp=[1", "mlp=[0")
  calibration = SimpleNamespace(overhead=dict.fromkeys((other, setting)))
  scenario = dataclasses.replace(
    shipped_target(drafter), calibration=calibration
  )
  assert scenario.setting == setting


def test_settings_without_effect_are_refused():
  for name, value in (("source", 9), ("draft_ways", 1)):
    with pytest.raises(ValueError, match=name):
      Scenario.of("llama3-70b", "lookup", CHIP, **{name: value})


def test_a_head_is_whole_on_every_chip_or_shared_out():
  target, eagle = "preset:llama3-8b", "head(preset:eagle3)"
  default, one, eight = (
    Scenario.of(target, eagle, CHIP, ways=8, draft_ways=ways).cost
    for ways in (None, 1, 8)
  )
  assert default == eight
  assert eight.weight_bytes == pytest.approx(one.weight_bytes / 8)
  assert eight.step.bytes == pytest.approx(one.step.bytes / 8)
  # Every chip reads its part of the projection in any case.
  assert eight.step.split_bytes == one.step.split_bytes > 0
  for drafter, ways, sentence in (
    (eagle, 3, "3 chips do not divide the 32 query heads"),
    (eagle, 16, r"draft_ways = 16; it must be in 1\.\.8"),
    ("head(preset:eagle3, weights=int8)", 8, "in integers is not shared out"),
  ):
    with pytest.raises(ValueError, match=sentence):
      _ = Scenario.of(target, drafter, CHIP, ways=8, draft_ways=ways).cost


def test_positions_of_a_source_are_priced():
  costs = [
    Scenario.of("t5-xxl", "model(t5-small)", CHIP, source=n).pair.target
    for n in (0, 100)
  ]
  less, more = (x.cost(1, 1, 50).bytes for x in costs)
  assert more - less == 100 * 24 * 2 * 4096 * 2


def test_an_early_exit_runs_layers_of_the_target():
  pair = Scenario.of("deepseek-v3", "early_exit(4)", CHIP).pair
  assert (pair.draft.stop, pair.drafter.exit_layer) == (4, 4)
