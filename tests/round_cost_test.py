"""round_cost prices every kind of drafter, each by hand-counted terms."""

import dataclasses

import jax
import numpy as np
import pytest

from learned_kinds import IDS, KINDS, TARGET, draft_head
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.token_map import TokenMap
from specdec.models import presets
from specdec.roofline import chips, drafter_cost, shapes
from specdec.roofline.cost import TYPICAL, Deployment, folds_of
from specdec.roofline.planning import best_k, best_tree, step_costs, sweep_k
from specdec.roofline.round_cost import (
  Overhead,
  TargetDraftPair,
  deployment_of,
  round_cost,
  step_cost,
)
from specdec.types import (
  NO_COST,
  UNKNOWN_COST,
  DrafterCost,
  Skip,
  StepCost,
  Window,
)

CHIP = chips.get("v6e")
LARGE = Deployment(shapes.get("llama3-8b"), CHIP, efficiency=TYPICAL)
TINY = Deployment(shapes.of_config(TARGET), CHIP)
HEAD = DrafterCost(
  weight_bytes=3e8,
  position_bytes=4096,
  step=StepCost(bytes=3e8, flops=2e8, position_bytes=4096, logits=128256),
)


def named(cost):
  return {name: (times, part) for name, times, part in cost.parts}


def test_no_draft_is_the_baseline_and_lookup_costs_its_verification():
  for drafter, draft in ((HEAD, 0), (NO_COST, ()), (UNKNOWN_COST, ())):
    cost = round_cost(LARGE, drafter, draft, 4, 100)
    assert cost.parts == (("target, 1 token", 1, LARGE.cost(4, 1, 100)),)
  lookup = round_cost(LARGE, NO_COST, 4, 2, 500)
  assert lookup.parts == (("target, 5 tokens", 1, LARGE.cost(2, 5, 500)),)


def test_a_draft_model_costs_the_same_by_config_shape_and_deployment():
  config = presets.get("llama3-1b", "bfloat16")
  shape = shapes.get("llama3-1b")
  by_config, by_shape = drafter_cost.model(config), drafter_cost.model(shape)
  assert by_config == dataclasses.replace(by_shape, shape=by_config.shape)
  assert by_config.shape.layers == shape.layers
  draft = dataclasses.replace(LARGE, shape=shape)
  deployed = TargetDraftPair(LARGE, by_shape, draft)
  chain = round_cost(LARGE, by_config, 4, 2, 500)
  assert named(chain) == {
    "draft, 1 token": (3, draft.cost(2, 1, 500)),
    "draft, 2 tokens": (1, draft.cost(2, 2, 500)),
    "target, 5 tokens": (1, LARGE.cost(2, 5, 500)),
  }
  tree = round_cost(LARGE, by_config, (3, 4), 2, 500)
  times, commit = named(tree)["commit"]  # the accepted path's KV is moved
  assert tree.parts[-2][0] == "target, 8 tokens" and times == 1
  held = sum(x.shape.cached for x in (LARGE, draft))
  assert commit.bytes == 2 * 2 * 3 * 2 * held
  for levels, cost in ((4, chain), ((3, 4), tree)):
    assert cost.parts == deployed.round(2, levels, 500).parts
  assert by_config.position_bytes == config.cache_bytes_per_token
  memory = TargetDraftPair(LARGE, by_config).memory(3, 700)
  assert memory == deployed.memory(3, 700)
  assert memory["draft weights"] == by_config.weight_bytes
  assert memory["draft cache"] == 3 * 700 * by_config.position_bytes
  other = dataclasses.replace(LARGE, shape=shapes.get("smollm2-135m"))
  with pytest.raises(ValueError, match="vocabularies of 128256 and 49152"):
    round_cost(other, by_config, 4, 1, 100)


def test_a_table_of_rounds_prices_levels_and_the_width_that_holds_them():
  draft = shapes.get("llama3-1b")
  pair = TargetDraftPair(LARGE, drafter_cost.model(draft))
  table = step_costs(pair, 2, 500, (1, 2, 3, 5))
  assert len(table) == 5 and list(table) == sorted(table)
  for levels in (0, 1, 2, 4):  # a width is just as wide
    seconds = pair.round(2, levels, 500).seconds
    assert table[levels] == pytest.approx(seconds, rel=1e-9)
  one = dataclasses.replace(LARGE, shape=draft).cost(2, 1, 500).seconds
  assert table[4] - table[3] == pytest.approx(one, rel=1e-6)
  scale = np.array([1.0, 1.0, 1.0, 9.0, 2.0])  # of 3 no round fills its width
  scaled = step_costs(pair, 2, 500, (1, 2, 3, 5), scale)
  assert scaled == pytest.approx([*table[:3], 2 * table[3], 2 * table[4]])


def test_a_table_of_rounds_knows_who_drafts_all_levels_whatever_is_decided():
  draft = drafter_cost.pard(shapes.get("llama3-1b"))
  pair = TargetDraftPair(LARGE, draft)
  alone, *table = step_costs(pair, 2, 500, (1, 2, 3, 5))
  drafting, verified = (
    {part[0].split(",")[0]: part[2] for part in pair.round(2, k, 500).parts}
    for k in (4, 1)
  )
  assert alone == pair.round(2, 0, 500).seconds
  expected = drafting["draft"].seconds + verified["target"].seconds
  assert table[0] == pytest.approx(expected, rel=1e-6)
  assert table[3] == pytest.approx(pair.round(2, 4, 500).seconds, rel=1e-6)
  exits = dataclasses.replace(DrafterCost(exit_layer=3), drafts_all=True)
  exits = TargetDraftPair(LARGE, exits)
  assert step_costs(exits, 2, 500, (1, 2, 3))[0] > 1.1 * alone


@pytest.mark.parametrize(
  "name, ordered", [("gemma3-270m", True), ("smollm2-135m", False)]
)
def test_a_draft_of_another_tokenizer_reads_rows_that_it_can_draw(
  name, ordered
):
  config = presets.get(name, "bfloat16")
  whole, target_size = drafter_cost.model(config), LARGE.shape.vocab_size
  column = None if ordered else np.zeros(target_size, np.int32)
  table = TokenMap(*(np.zeros(n, np.int32) for n in (5, 6, 7, 0)), column)
  if ordered:  # as `in_order` leaves it
    config = dataclasses.replace(config, tied=False)
  cost = drafter_cost.translated(config, target_size, 3, table)
  layers = whole.shape.num_parameters - config.vocab_size * config.width
  head = target_size if ordered else config.vocab_size
  assert cost.step.bytes == 2 * (layers + head * config.width)
  tables = 4 * (18 + (0 if ordered else target_size))
  held = tables + whole.weight_bytes
  held += 2 * target_size * config.width if ordered else 0
  assert cost.weight_bytes == held
  assert cost.position_bytes == 3 * (whole.position_bytes + 4)
  parts = named(round_cost(LARGE, cost, 3, 2, 500))
  assert parts["draft, 1 token"][0] == 2
  assert parts["draft, 4 tokens"][0] == 1  # what is committed, in pieces
  memory = TargetDraftPair(LARGE, cost).memory(2, 100)
  assert memory["draft cache"] == 2 * 100 * cost.position_bytes


@pytest.mark.parametrize("kv, ways", [(None, 1), ("int8", 1), (None, 8)])
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen3-8b"])
def test_a_copy_of_a_target_reads_its_cache(name, kv, ways):
  """Whatever that holds, and wherever; its own weights are smaller."""
  config = dataclasses.replace(presets.get(name, "bfloat16"), kv=kv)
  if config.num_heads % ways:
    ways = 4
  target = Deployment(shapes.of_config(config), CHIP, ways=ways)
  copy = deployment_of(target, drafter_cost.quantized(config, 64))
  for context in (100, 5000):
    ours, theirs = (
      {term.name: term for term in one.cost(2, 3, context).terms}
      for one in (copy, target)
    )
    for name in ("KV read", "KV written", "collectives"):
      assert ours[name] == theirs[name]
    small = (1 + 4 / 64) / 2
    for name in ("weights", "projection"):
      assert ours[name].bytes == pytest.approx(small * theirs[name].bytes)
      assert ours[name].flops == theirs[name].flops


def test_two_drafters_read_the_windows_of_both():
  one = DrafterCost(step=StepCost(windows=((Window(50), 4.0, 2.0),), layers=1))
  both = drafter_cost.fallback(one, one).step
  twice, once = (step_cost(LARGE, x, 2, 3, 500).terms for x in (both, one.step))
  read = [term.name for term in once].index("KV read")
  assert twice[read].bytes == 2 * once[read].bytes == 2 * 2 * 49 * 4


def test_a_commit_moves_positions_and_no_state():
  """Of recurrent layers slots, of an encoder-decoder none of the source."""
  config = presets.get("qwen3-next-80b-a3b", "bfloat16")
  target = Deployment(shapes.of_config(config), CHIP)
  tree = named(round_cost(target, NO_COST, (2, 2, 1), 8, 1000))
  kv = 12 * 2 * 2 * 256 * 2  # layers, keys and values, heads, width, bytes
  heads = 32 * (4 * (128 + 1) + 2 * 128)  # of values; rates, and their inputs
  slots = 36 * (heads + 16 * 128 * (4 + 2 * 2))
  assert tree["commit"][1].bytes == 2 * 8 * 4 * (kv + slots)
  config = presets.get("t5-xl", "bfloat16")
  target = Deployment(shapes.of_config(config), CHIP, source=512)
  tree = named(round_cost(target, NO_COST, (2, 2, 1), 8, 100))
  assert tree["commit"][1].bytes == 2 * 8 * 4 * 24 * 2 * 32 * 64 * 2


def test_sources_of_cross_attention_are_never_in_eight_bits():
  config = presets.get("t5-xl", "bfloat16")
  sizes = [
    Deployment(shapes.of_config(x), CHIP, source=512).cache_bytes(1, 0)
    for x in (config, dataclasses.replace(config, kv="int8"))
  ]
  assert sizes[0] == sizes[1] == 24 * 512 * 2 * 32 * 64 * 2


def test_states_take_in_what_a_round_may_commit():
  config = presets.get("qwen3-next-80b-a3b", "bfloat16")
  target = Deployment(shapes.of_config(config), CHIP)

  def written(k):
    cost = named(round_cost(target, NO_COST, k, 1, 1000))
    terms = cost[f"target, {k + 1} token{'s' if k else ''}"][1].terms
    return next(t.bytes for t in terms if t.name == "KV written")

  one, five = (written(k) for k in (0, 4))
  assert five == pytest.approx(5 * one)


def test_an_exit_and_skipped_layers_run_parts_of_the_target():
  early_exit = DrafterCost(exit_layer=8)
  parts = named(round_cost(LARGE, early_exit, 4, 2, 500))
  first = dataclasses.replace(LARGE, stop=8)
  behind = dataclasses.replace(LARGE, start=8)
  leaf = dataclasses.replace(first, head=False)
  assert parts["draft, 1 token"] == (4, first.cost(2, 1, 500))
  assert parts["first layers, 1 token"] == (1, leaf.cost(2, 1, 500))
  assert parts["target, 5 tokens"] == (1, behind.cost(2, 5, 500))
  config, skip = presets.get("llama3-8b", "bfloat16"), Skip((3, 4), (5,))
  drafter = drafter_cost.layer_skip(config, skip)
  less = dataclasses.replace(LARGE, shape=shapes.of_config(config, skip=skip))
  parts = named(round_cost(LARGE, drafter, 4, 2, 500))
  assert parts["draft, 1 token"] == (4, less.cost(2, 1, 500))
  for cost in (early_exit, drafter):
    memory = TargetDraftPair(LARGE, cost).memory(1, 100)
    assert memory.keys() == {"target weights", "target cache"}


def test_stated_bytes_and_flops_by_hand():
  deployment = Deployment(shapes.get("llama3-8b"), CHIP)  # ideal
  cost = round_cost(deployment, HEAD, 4, 2, 500)
  times, step = named(cost)["draft, 1 token"]
  assert times == 4
  moved = 3e8 + 2 * 500 * 4096 + 2 * 4096 + 2 * 4 * 2 * 128256
  assert step.bytes == moved
  assert step.flops == 2 * 2e8
  assert step.seconds == pytest.approx(moved / CHIP.bandwidth)
  draft, target = cost.only("draft"), cost.only("target")
  assert cost.only("update", "commit").parts == ()
  for name in ("bytes", "flops", "sent", "seconds"):
    by_hand = 4 * getattr(step, name)
    assert getattr(draft, name) == pytest.approx(by_hand)
    assert getattr(target, name) == getattr(deployment.cost(2, 5, 500), name)
    whole = getattr(draft, name) + getattr(target, name)
    assert getattr(cost, name) == pytest.approx(whole)
  # A tree runs its frontiers.
  tree = named(round_cost(deployment, HEAD, (3, 4), 2, 500))
  assert [tree[f"draft, {n}"][0] for n in ("1 token", "3 tokens")] == [1, 1]
  moved = 2 * 2 * 3 * 2 * deployment.shape.cached
  assert tree["commit"][1].bytes == moved


def test_stated_numbers_of_a_decoder_cost_what_its_shape_does():
  shape = shapes.get("llama3-1b")
  [(layer, count)] = shape.counted(0, len(shape.layers))
  weights = count * layer.weights
  stated = DrafterCost(
    position_bytes=2 * shape.cached,
    step=StepCost(
      bytes=2 * weights,
      flops=2 * weights,
      target_bytes=2 * shape.embedding,
      target_flops=2 * shape.embedding,
      position_bytes=2 * shape.cached,
      position_flops=2 * count * layer.score,
      logits=shape.vocab_size,
      layers=count,
    ),
    catch_up=1,
  )
  efficiency = dataclasses.replace(TYPICAL, overhead=1e-4, layer_overhead=1e-5)
  target = dataclasses.replace(LARGE, efficiency=efficiency)
  expected = round_cost(target, drafter_cost.model(shape), 4, 8, 3000)
  cost = round_cost(target, stated, 4, 8, 3000)
  for (_, times, one), (_, count, other) in zip(expected.parts, cost.parts):
    assert times == count
    for name in ("bytes", "flops", "seconds"):
      assert getattr(one, name) == pytest.approx(getattr(other, name))


def test_every_k_is_predicted_and_the_fastest_is_best():
  pair = TargetDraftPair(LARGE, HEAD)
  rates = (0.8, 0.6, 0.3, 0.1)
  points = sweep_k(pair, 2, 500, rates)
  assert points[0][:2] == (0, 1.0)
  for point in points[1:]:
    assert point.seconds == pair.round(2, point.k, 500).seconds
    assert point.speedup == pair.speedup(2, 500, rates[: point.k])
  best = best_k(pair, 2, 500, rates)
  assert best.speedup == max(point.speedup for point in points)
  # Rounds without draft tokens are as fast as the baseline's.
  half = sweep_k(pair, 2, 500, rates, wide=0.5)[3].seconds
  assert half == pytest.approx((points[3].seconds + points[0].seconds) / 2)
  scaled = sweep_k(pair, 2, 500, rates, scale=[2.0, 1.0, 3.0, 1.0, 1.0])
  assert scaled[2].seconds == pytest.approx(3 * points[2].seconds)
  assert scaled[2].speedup == pytest.approx(points[2].speedup * 2 / 3)


def test_steps_of_a_parallel_drafter_and_tokens_to_catch_up():
  parallel = dataclasses.replace(HEAD, steps=1)
  assert "draft, 6 tokens" in named(round_cost(LARGE, parallel, 6, 1, 0))
  late = dataclasses.replace(HEAD, catch_up=1)
  parts = named(round_cost(LARGE, late, 3, 1, 0))
  assert parts["draft, 2 tokens"][0] == 1
  assert parts["draft, 1 token"][0] == 2


def test_every_chip_reads_its_part_of_rows_for_tokens():
  """Of a drafter's own as of the target's, and it has its part of the logits,
  or gathers all of them; all else every chip reads whole."""
  step = StepCost(
    bytes=1e9, flops=1e9, split_bytes=8e8, split_flops=4e8, target_bytes=4e8
  )
  alone, four = (
    step_cost(dataclasses.replace(LARGE, ways=ways), step, 2, 3, 0)
    for ways in (1, 4)
  )
  assert (alone.bytes, four.bytes) == (2.2e9, 1.3e9)
  assert (alone.flops, four.flops) == (6 * 1.4e9, 6 * 1.1e9)
  wide = dataclasses.replace(LARGE, ways=4)
  some = step_cost(wide, StepCost(logits=100, split_logits=4000), 2, 3, 0)
  assert some.bytes == 2 * 4 * 6 * (100 + 1000)
  fewer = step_cost(wide, StepCost(gathered_logits=100), 2, 3, 0)
  assert fewer.bytes == 2 * 4 * 6 * (100 + 25)  # its part, and all
  reduced = chips.all_reduce(wide.chip, 4, 4 * 6 * 100)
  assert (fewer.sent, reduced.size > 0) == (reduced.size, True)
  assert step_cost(LARGE, StepCost(gathered_logits=100), 2, 3, 0).bytes == 4800


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_fewer_logits_are_computed_in_parts_gathered_and_spread(kind):
  cost = head_cost.drafter_cost(draft_head(kind), TARGET)
  for ways in (1, 2):
    parts = round_cost(dataclasses.replace(TINY, ways=ways), cost, 2, 3, 50)
    moved = sum(
      times * term.bytes
      for _, times, part in parts.only("draft").parts
      for term in part.terms
      if term.name == "logits"
    )
    fewer = len(IDS)
    computed = (2 if kind == "dspark" else 1) * fewer  # and by its successor
    # One chip has computed what it gathers.
    gathered = fewer if ways > 1 else 0
    computed, spread = computed / ways, TARGET.vocab_size / ways
    by_hand = 2 * 4 * 3 * 2 * (computed + gathered + spread)
    assert moved == pytest.approx(by_hand)


def test_an_unknown_cost_is_not_priced():
  with pytest.raises(ValueError, match="is unknown"):
    round_cost(LARGE, UNKNOWN_COST, 4, 1, 100)
  pair = TargetDraftPair(LARGE, UNKNOWN_COST)
  with pytest.raises(ValueError, match="is unknown"):
    pair.memory(1, 100)
  assert not drafter_cost.fallback(NO_COST, UNKNOWN_COST).is_complete


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full", [True, False])
def test_a_trained_head_reads_its_weights_once_a_step(kind, full):
  head = draft_head(kind, full)
  config = head.head_config
  drafter = head_cost.drafter_cost(head, TARGET)
  net = jax.eval_shape(head.init, jax.random.key(0))
  rows = 0
  if config.head == "shared":
    rows = TARGET.width * (TARGET.vocab_size if full else len(IDS))
  copied = 0 if full else rows
  assert drafter.weight_bytes == 4 * (head_cost.num_weights(net) + copied)
  step = drafter.step
  num_tokens = TARGET.vocab_size if full else len(IDS)
  own = num_tokens * config.width if config.head == "own" else 0
  assert step.split_bytes == 4 * (own + copied)  # a chip of many reads a part
  assert step.target_bytes == 4 * (rows - copied)
  read = step.bytes + step.split_bytes + step.target_bytes
  assert read == 4 * head_cost.step_weights(head, TARGET)[0]
  projected = step.split_flops + step.target_flops
  assert 2 * (step.flops + projected) == read
  cost = round_cost(TINY, drafter, 3, 2, 50)
  parts = named(cost)
  heads = [p for name, p in parts.items() if name.startswith("draft")]
  verified = "target, 4 tokens"
  if config.exits:
    assert drafter.exit_layer == config.exit_layer
    first = dataclasses.replace(TINY, stop=config.exit_layer, head=False)
    assert parts["draft, 1 token"] == (3, first.cost(2, 1, 50))
    assert parts["draft, 1 token"][0] == 3
    late = dataclasses.replace(TINY, start=config.exit_layer)
    assert parts[verified][1] == late.cost(2, 4, 50)
  else:
    assert sum(times for times, _ in heads) == 3
    assert parts[verified][1] == TINY.cost(2, 4, 50)
  assert ("update, 3 tokens" in parts) == head.has_kv_cache
  pair = TargetDraftPair(TINY, drafter)
  assert pair.round(2, 3, 50) == cost
  best = best_k(pair, 1, 50, 0.9)
  assert best.k == 0 or best.speedup > 1
  best_tree(pair, 1, 50, (0.7, 0.2), 8)


def test_a_fallback_holds_both_and_drafts_by_the_other():
  both = drafter_cost.fallback(NO_COST, HEAD)
  assert both == HEAD
  model = drafter_cost.model(shapes.get("llama3-1b"))
  both = drafter_cost.fallback(HEAD, model)
  assert both.weight_bytes == HEAD.weight_bytes + model.weight_bytes
  assert (both.shape, both.catch_up) == (model.shape, 1)
  one, two, sum_ = (
    round_cost(LARGE, cost, 4, 1, 100).seconds for cost in (HEAD, model, both)
  )
  verified = round_cost(LARGE, NO_COST, 4, 1, 100).seconds
  assert sum_ - verified == pytest.approx(one + two - 2 * verified, rel=1e-2)
  with pytest.raises(ValueError, match="at most runs a decoder"):
    drafter_cost.fallback(model, DrafterCost(exit_layer=2))


def test_a_head_is_priced_in_plans_with_its_memory_and_overhead():
  overhead = Overhead(((1, 1e-3, 0),))
  pair = TargetDraftPair(LARGE, HEAD, overhead=overhead)
  free = TargetDraftPair(LARGE).speedup(1, 1000, [0.8, 0.6])
  extra = pair.memory(2, 100)
  assert extra["draft weights"] == 3e8
  assert extra["draft cache"] == 2 * 100 * 4096
  with_overhead = pair.round(1, 2, 0)
  assert with_overhead.overhead == 1e-3
  seconds = round_cost(LARGE, HEAD, 2, 1, 0).seconds
  assert with_overhead.seconds == pytest.approx(seconds + 1e-3)
  assert 1 < pair.speedup(1, 1000, [0.8, 0.6]) < free
  assert deployment_of(LARGE, HEAD) is None


@pytest.mark.parametrize("slack, tokens, committed", [(5, 4, 4), (20, 5, 3)])
def test_recurrent_slots_fold_as_often_as_they_fill(slack, tokens, committed):
  """Counted: a fold leaves nothing of the slack, a pass fills some of it."""
  used = folds = 0
  for _ in range(1000):
    if used + tokens > slack:
      used, folds = 0, folds + 1
    used += committed
  priced = folds_of(slack, tokens, committed)
  assert priced == pytest.approx(folds / 1000, abs=0.01)


def test_a_text_longer_than_num_nodes_leaves_no_slot():
  hybrid = presets.get("qwen3-next-80b-a3b", "bfloat16")
  deployment = Deployment(shapes.of_config(hybrid), chips.get("v5e"))

  def written(tokens):
    terms = deployment.cost(1, tokens, 1000, committed=1).terms
    [term] = (x for x in terms if x.name == "KV written")
    return term.bytes

  assert written(65) < written(64) / 10
