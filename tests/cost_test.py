"""The cost model: shapes add up, terms equal hand counts, invariants hold."""

import dataclasses
import itertools

import pytest

import closed_form
from specdec.models import presets
from specdec.roofline import chips, drafter_cost, planning, shapes, theory
from specdec.roofline.cost import (
  DRAW,
  IDEAL,
  TYPICAL,
  Deployment,
  Efficiency,
  pass_bound,
)
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import Skip

V5E, H100 = chips.get("v5e"), chips.get("h100")
LLAMA = shapes.get("llama3-8b")


def term(cost, name):
  return {term.name: term for term in cost.terms}[name]


def test_chips_and_their_ridges():
  for name, ridge in {"v5e": 240.5, "h100": 295.5}.items():
    chip = chips.get(name)
    flops = chip.rate("bfloat16")
    assert flops / chip.bandwidth == pytest.approx(ridge, abs=0.1)
  for chip in chips.CHIPS.values():
    assert chip.source and ("inferred" in chip.source) == bool(chip.inferred)
    assert 100 < chip.rate("bfloat16") / chip.bandwidth < 700
    assert all(rate >= chip.rate("bfloat16") for rate in chip.flops.values())
  assert chips.get("v6e", bandwidth=1e12).bandwidth == 1e12
  assert chips.get("v4", int8=1e14).rate("int8") == 1e14
  assert chips.get("v8t", fp8=6e15).inferred == ("bfloat16",)


NAN = float("nan")


@pytest.mark.parametrize(
  "construct, sentence",
  [
    (lambda: chips.get("v9"), "no chip 'v9'; known: v3, v4, v5e"),
    (lambda: chips.get("v4", width=3), "has no number 'width'"),
    (lambda: chips.get("v4", axes=1.5), "axes = 1.5; it must be whole"),
    (lambda: chips.get("v4", bandwidth=0), "bandwidth must be > 0"),
    (lambda: chips.get("v4", hop_seconds=NAN), "hop_seconds must be >= 0"),
    (lambda: V5E.rate("float32"), "no products of float32; it has: bf"),
    (lambda: shapes.get("gpt-5"), "known: llama2-7b"),
    (lambda: shapes.scaled(LLAMA, 0), "outside"),
    (lambda: Efficiency(flops=0), "it must be finite and > 0"),
    (lambda: Efficiency(kv=NAN), "it must be finite and > 0"),
    (lambda: Efficiency(p=0.5), "p = 0.5; it must be >= 1"),
    (lambda: Efficiency(overhead=NAN), "it must be finite and >= 0"),
    (lambda: Efficiency(layer_overhead=-1.0), "it must be finite and >= 0"),
    (lambda: Deployment(LLAMA, V5E, weights="int3"), "no dtype 'int3'"),
    (lambda: Deployment(LLAMA, V5E, ways=3), "do not divide 32 heads"),
    (
      lambda: Deployment(shapes.get("qwen2.5-7b"), V5E, ways=7),
      "neither divides the other",
    ),
    (lambda: Deployment(LLAMA, V5E, correlation=-0.01), "must be in"),
    (lambda: Deployment(LLAMA, V5E, correlation=1.01), "must be in"),
    (lambda: Deployment(LLAMA, V5E, correlation=NAN), "must be in"),
  ],
)
def test_numbers_that_cannot_be_are_refused(construct, sentence):
  with pytest.raises(ValueError, match=sentence):
    construct()


def test_shapes_have_as_many_weights_as_published():
  published = {
    "llama3-70b": 70.6, "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5,
    "qwen3-next-80b-a3b": 79.67, "deepseek-v3": 671.0,
    "t5-small": 0.077, "t5-base": 0.248,
    "t5-large": 0.783, "t5-xl": 2.85, "t5-xxl": 11.1,
  }  # fmt: skip
  weights = {n: shapes.get(n).num_parameters / 1e9 for n in published}
  assert weights == pytest.approx(published, rel=0.005)


# The oracle knows no recurrent layers.
WITH_ATTENTION = [x for x in presets.names() if not presets.get(x).recurrence]


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_shapes_and_bounds_of_presets_are_the_closed_form(name):
  """The oracle of the bounds is closed_form.py."""
  for dtype in ("float32", "bfloat16"):
    config = presets.get(name, dtype)
    for where in ((1, 1, 0), (4, 3, 5000), (2, 2, 20_000)):
      bound = pass_bound(config, *where)
      assert bound.bytes == closed_form.pass_bytes(config, *where)
      expected = closed_form.pass_flops(config, *where)
      assert bound.flops == pytest.approx(expected, rel=1e-3)
  shape = shapes.get(name)
  # Without the final norm, and the decoder's biases by relative position.
  rest = config.width + config.relative_buckets * config.num_heads
  assert config.num_parameters - shape.num_parameters == rest
  assert 2 * shape.cached == config.cache_bytes_per_token


def test_scaled_models_have_about_the_share_asked_for():
  whole = shapes.get("llama3-70b")
  layers = whole.num_parameters - 2 * whole.embedding
  for share in (1, 0.3, 0.1, 0.01):
    small = shapes.scaled(whole, share)
    weights = small.num_parameters - 2 * small.embedding
    assert weights == pytest.approx(share * layers, rel=0.02)


def test_experts_touched():
  """roofline.md: E = 512, k = 10, 4 tokens, independently: 38.85."""
  layer = shapes.Layer(0, 1, 1, 1, expert=10**6, num_experts=512, per_token=10)
  shape = shapes.Shape("", (layer,), 1, 1, 8, True)
  deployment = Deployment(shape, V5E, correlation=1.0)
  touched = term(deployment.cost(4, 1, 0), "experts")
  assert touched.bytes / 2e6 == pytest.approx(38.85, abs=0.01)
  assert touched.flops == 2 * 4 * 10 * 1e6
  alike = dataclasses.replace(deployment, correlation=0.6).cost(4, 1, 0)
  assert alike.bytes < deployment.cost(4, 1, 0).bytes
  one = term(deployment.cost(1, 1, 0), "experts")
  assert one.bytes == pytest.approx(2 * 10 * 1e6)


def test_all_reduce_by_hand():
  # 8 v5e are 4 x 2, lines both; of 1 MB each axis carries a share.
  assert chips.arranged(8, 2) == (4, 2)
  assert chips.arranged(16, 3) == (4, 2, 2)
  assert chips.arranged(1, 3) == ()
  cost = chips.all_reduce(V5E, 8, 1e6)
  rate = 4.5e10 * (4 / 3 + 2)
  assert cost.seconds == pytest.approx(2 * 1e6 / rate)
  # Small ones wait for the hops: 3 + 1 of them, there and back.
  assert chips.all_reduce(V5E, 8, 16).seconds == pytest.approx(8e-6)
  # A ring of 16: both ways at once, half its length of hops.
  ring = chips.all_reduce(dataclasses.replace(V5E, axes=1), 16, 1e8)
  assert ring.seconds == pytest.approx(2 * 1e8 / 9e10)
  switch = chips.all_reduce(H100, 8, 1e8)
  assert switch.seconds == pytest.approx(2e-6 + 2e8 * 7 / 8 / 4.5e11)
  assert chips.all_reduce(V5E, 1, 1e6) == (0.0, 0.0)


def test_a_mesh_shares_weights_heads_and_rows():
  shape = shapes.get("llama3-70b")
  alone, shared = Deployment(shape, V5E), Deployment(shape, V5E, ways=16)
  keys, norms = 80 * 2 * 8192 * 8 * 128 * 2, 80 * 2 * 8192 * 2  # bytes
  split = alone.weight_bytes - keys - norms
  # Two chips have the keys of one head, and all of them the norms.
  assert shared.weight_bytes == split / 16 + keys / 8 + norms
  # 8 KV heads: 16 chips keep each of them twice.
  assert alone.cache_bytes(8, 100) == 8 * shared.cache_bytes(8, 100)
  both = Deployment(shape, V5E, ways=16, replicas=4)
  assert both.cost(32, 1, 100) == shared.cost(8, 1, 100)
  assert shared.cost(8, 1, 100).sent > 0 == alone.cost(8, 1, 100).sent


def test_quantised_weights_move_less_and_keep_their_math():
  wide, narrow = Deployment(LLAMA, V5E), Deployment(LLAMA, V5E, weights="int4")
  byte = Deployment(LLAMA, V5E, weights="int8")
  assert narrow.weight_bytes == wide.weight_bytes / 4
  assert narrow.dtype == "bfloat16"  # no product of that type
  assert byte.dtype == "int8"
  assert dataclasses.replace(byte, compute="bfloat16").dtype == "bfloat16"
  assert narrow.cost(1, 1, 0).seconds < wide.cost(1, 1, 0).seconds / 3
  # Attention is of KV's type: 256 tokens at a long context are arithmetic.
  reads = [term(one.cost(1, 256, 4096), "KV read") for one in (wide, byte)]
  assert reads[0].seconds == reads[1].seconds


def test_eight_bit_keys_move_less_and_keep_the_math():
  wide = Deployment(LLAMA, V5E)
  byte = dataclasses.replace(wide, kv="int8")
  assert byte.cache_bytes(1, 100) == wide.cache_bytes(1, 100) / 2
  # 256 tokens at a long context are arithmetic, one is memory.
  for tokens, ratio in ((1, 2), (256, 1)):
    reads = [term(x.cost(1, tokens, 4096), "KV read") for x in (wide, byte)]
    assert reads[0].seconds == pytest.approx(ratio * reads[1].seconds, rel=0.02)


def test_a_decoder_with_a_source_reads_it_and_sums_once_more():
  shape = shapes.get("t5-xxl")
  alone, with_source = (
    Deployment(shape, chips.get("v4"), ways=8, source=n) for n in (0, 512)
  )
  more = with_source.cost(2, 1, 64).bytes - alone.cost(2, 1, 64).bytes
  assert more == 2 * 512 * 24 * 2 * 4096 * 2 / 8
  assert with_source.cache_bytes(2, 64) - alone.cache_bytes(2, 64) == more
  byte, less = (
    dataclasses.replace(x, kv="int8").cache_bytes(2, 64)
    for x in (with_source, alone)
  )
  assert byte - less == more  # a source is not in eight bits
  one = chips.all_reduce(chips.get("v4"), 8, 2 * 4096 * 2)
  few = chips.all_reduce(chips.get("v4"), 8, 4 * 2)
  sent = (3 * 24 + 1) * one.size + DRAW * few.size
  assert with_source.cost(2, 1, 64).sent == pytest.approx(sent)


def test_efficiency_combines_from_the_larger_to_the_sum():
  assert Efficiency().combined(3.0, 4.0) == 4
  assert Efficiency(p=1).combined(3.0, 4.0) == 7
  assert Efficiency(p=2).combined(3.0, 4.0) == pytest.approx(5)
  curve = Efficiency(rows=((1, 1.0), (4, 2.0)))
  assert [curve.factor(m) for m in (1, 2, 4, 99)] == [1, 1.5, 2, 2]


def test_a_factor_slows_the_products_alone():
  slow = Efficiency(p=1, rows=((1, 2.0),))
  fast = Deployment(LLAMA, V5E, efficiency=Efficiency(p=1)).cost(4, 2, 1000)
  cost = Deployment(LLAMA, V5E, efficiency=slow).cost(4, 2, 1000)
  for a, b in zip(fast.terms, cost.terms):
    twice = 2 if a.name in ("weights", "projection") else 1
    assert b.seconds == pytest.approx(twice * a.seconds)
  assert cost.seconds == pytest.approx(sum(x.seconds for x in cost.terms))


def pair(
  chip="v5e", efficiency=IDEAL, target="llama3-8b", share=0.03, **numbers
):
  shape = shapes.get(target)
  draft = drafter_cost.model(shapes.scaled(shape, share))
  chip = chips.get(chip, **numbers)
  return TargetDraftPair(Deployment(shape, chip, efficiency=efficiency), draft)


@pytest.mark.parametrize("chip", ["v5p", "h100"])
@pytest.mark.parametrize("efficiency", [IDEAL, TYPICAL])
def test_invariants_over_a_grid(chip, efficiency):
  """roofline.md, 2.10."""
  candidate = pair(chip, efficiency)
  batches, contexts = (1, 4, 16, 64, 256), (0, 2048, 32_768)
  draft = dataclasses.replace(candidate.target, shape=candidate.drafter.shape)
  for batch, context in itertools.product(batches, contexts):
    for k in (0, 1, 4, 8):
      gains = []
      for alpha in (0.0, 0.5, 0.8, 1.0):
        prefix_acceptance = theory.iid_prefix_acceptance(alpha, k)
        gain = candidate.speedup(batch, context, prefix_acceptance)
        if k == 0:
          assert gain == 1
        assert gain <= theory.expected_tokens(prefix_acceptance) + 1e-12
        gains.append(gain)
      assert gains == sorted(gains)  # monotone in alpha
    cost = draft.cost(batch, 1, context).seconds
    cost /= candidate.round(batch, 0, context).seconds
    assert planning.best_k(candidate, batch, context, 0.9 * min(1, cost)).k == 0
  best = [planning.best_k(candidate, b, 0, 0.8).k for b in (*range(1, 33), 64)]
  assert best == sorted(best, reverse=True)
  gains = [planning.best_k(candidate, 256, s, 0.8).speedup for s in contexts]
  assert gains == sorted(gains)


def test_a_layer_skip_reads_what_it_keeps():
  config = presets.get("llama3-8b")
  half = Skip(tuple(range(16)), tuple(range(8, 24)))
  cost = drafter_cost.layer_skip(config, half)
  less = cost.shape
  assert len(less.layers) == 24  # 8 to 15 are not there at all
  mlp = 3 * config.width * config.mlp_width
  one = LLAMA.layers[0].weights
  assert sum(layer.weights for layer in less.layers) == 16 * one
  assert {layer.weights for layer in less.layers} == {mlp, one - mlp, one}
  assert less.cached == LLAMA.cached / 2
  moe = dataclasses.replace(config, num_experts=4, experts_per_token=2)
  experts = [
    shapes.of_config(moe, skip=s).layers
    for s in (Skip(), Skip(mlp=range(32)), Skip(attention=range(32)))
  ]
  assert [layers[0].num_experts for layers in experts] == [4, 0, 4]
  router = 4 * moe.width
  assert experts[2][0].weights == router
  assert experts[1][0].weights == experts[0][0].weights - router
  assert not shapes.of_config(config, skip=Skip(range(32), range(32))).layers


def test_break_even_and_schedules():
  candidate = pair("v5e", TYPICAL)
  batch = planning.break_even_batch(candidate, 0, 0.7)
  assert planning.best_k(candidate, batch - 1, 0, 0.7).k > 0
  assert planning.best_k(candidate, batch, 0, 0.7).k == 0
  context = planning.break_even_context(candidate, batch, 0.7)
  assert planning.best_k(candidate, batch, context - 1, 0.7).k == 0
  assert planning.best_k(candidate, batch, context, 0.7).k > 0
  assert planning.break_even_batch(candidate, 0, 1.0, largest=8) is None
  none = planning.schedule(candidate, 0, 0.0, largest=8)
  assert none == [(1, 8, 0)]
  rising = [planning.BatchRange(1, 1, 1), planning.BatchRange(2, 8, 2)]
  for ranges, sentence in ((none, "no batch pays"), (rising, "wants k = 1")):
    with pytest.raises(ValueError, match=sentence):
      planning.as_tensorrt_llm(ranges)
  batch_ranges = planning.schedule(candidate, 0, 0.7, largest=2 * batch)
  assert batch_ranges[0].first == 1 and batch_ranges[-1].last == 2 * batch
  for a, b in itertools.pairwise(batch_ranges):
    assert b.first == a.last + 1 and b.k < a.k
  assert batch_ranges[-1].k == 0
  for_vllm = planning.as_vllm(batch_ranges)
  assert for_vllm["num_speculative_tokens"] == batch_ranges[0].k
  entries = for_vllm["num_speculative_tokens_per_batch_size"]
  assert entries == [list(s) for s in batch_ranges]
  for_tensorrt = planning.as_tensorrt_llm(batch_ranges)["draft_len_schedule"]
  assert for_tensorrt == {s.last: s.k for s in batch_ranges[:-1]}


def test_equal_memory_gives_speculation_the_smaller_batch():
  candidate = pair("v5p", TYPICAL, share=0.1)
  ours, baseline = planning.at_equal_memory(candidate, 8192, [0.8, 0.64])
  assert baseline.k == 0 and ours.k == 2
  assert 0 < ours.batch < baseline.batch
  candidate.check_memory(ours.batch, 8192)
  with pytest.raises(ValueError, match=r"more than the .* that can be used"):
    candidate.check_memory(ours.batch + 1, 8192)
  with pytest.raises(ValueError, match="target weights take most"):
    planning.at_equal_memory(pair(target="llama3-70b"), 100, [0.8])


def test_the_best_draft_is_neither_the_largest_nor_the_smallest():
  """With the acceptance of LaMDA 137B's drafts (Leviathan et al., table 3)."""
  target = Deployment(
    shapes.get("llama3-70b"), H100, ways=8, efficiency=TYPICAL
  )
  distribution = theory.fit_power_law([1e8, 2e9, 8e9], [0.61, 0.71, 0.75])
  drafts = [shapes.scaled(target.shape, 10.0**-i) for i in range(4)]
  sizes = planning.best_draft(target, drafts, distribution, 1, 2048)
  alphas = [sized.alpha for sized in sizes]
  assert alphas == sorted(alphas, reverse=True)
  gains = [sized.best.speedup for sized in sizes]
  assert max(gains) > gains[0] == 1 and max(gains) > gains[-1]


def test_the_best_tree_beats_the_best_chain():
  candidate = pair("v5e", TYPICAL)
  chain = planning.best_k(candidate, 1, 2048, 0.6)
  tree = planning.best_tree(candidate, 1, 2048, [0.6, 0.2, 0.1], most=32)
  baseline = candidate.round(1, 0, 2048).seconds
  assert tree.tokens * baseline / tree.seconds > chain.speedup
  assert planning.best_tree(candidate, 4096, 0, [0.3]).paths == []


def test_skipped_sublayers_of_a_mixture():
  """All but experts goes with an MLP, and stays with it without attention."""
  config = presets.get("llama4-maverick")
  mixture, dense = (
    shapes.of_config(config).layers[1],
    shapes.of_config(config).layers[0],
  )
  inner = 3 * 5120 * 8192 + 128 * 5120  # the shared expert and the router
  bare = shapes.of_config(config, skip=Skip((), (0, 1))).layers
  assert bare[1].weights == mixture.weights - inner and not bare[1].expert
  assert bare[0].weights == dense.weights - 3 * 5120 * 16_384
  alone = shapes.of_config(config, skip=Skip((1,), ())).layers[1]
  assert alone.weights == inner and alone.num_experts == 128
