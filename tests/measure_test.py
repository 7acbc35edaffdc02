"""Decoding in turns, timing, and the times that bytes forbid."""

import dataclasses
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import closed_form
from specdec import acceptance, drafters
from specdec.benchmark import runs, timing
from specdec.benchmark.batches import Batch, batches_of
from specdec.benchmark.decoder import Decoder
from specdec.models import presets, transformer
from specdec.models.config import TransformerConfig
from specdec.roofline import hardware
from specdec.types import Params

SMALL = TransformerConfig(
  vocab_size=50,
  num_layers=3,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  tied=True,
)
WEIGHTS = 4 * SMALL.num_parameters
POSITION = SMALL.cache_bytes_per_token


@pytest.mark.parametrize(
  "changes, batch, tokens, context, expected",
  [
    ({}, 1, 1, 0, WEIGHTS + POSITION),
    ({}, 4, 2, 100, WEIGHTS + 4 * 102 * POSITION),
    ({"dtype": "bfloat16"}, 4, 2, 100, (WEIGHTS + 4 * 102 * POSITION) // 2),
    # An embedding of its own is read by the row.
    ({"tied": False}, 1, 1, 0, WEIGHTS + POSITION + 4 * 32),
    (
      {"windows": (10, None, 10)},
      *(1, 1, 100, WEIGHTS + POSITION + (9 + 100 + 9) * POSITION // 3),
    ),
  ],
)
def test_a_pass_reads_weights_once_and_the_kv_it_sees(
  changes, batch, tokens, context, expected
):
  config = dataclasses.replace(SMALL, **changes)
  assert closed_form.pass_bytes(config, batch, tokens, context) == expected


def test_idle_experts_are_not_read():
  config = presets.get("mixtral-8x7b", "bfloat16")
  billions = closed_form.pass_bytes(config, 1, 1, 0) / 2e9
  # 12.9 B active parameters as published, less the embedding.
  assert billions == pytest.approx(12.88 - 0.131, abs=0.02)


@pytest.fixture(scope="module")
def small():
  params = transformer.init_params(SMALL, jax.random.key(0))
  return transformer.model(SMALL), params


def test_arithmetic_is_what_the_compiler_counts(small):
  model, params = small
  cache = model.init_cache(2, 32)  # all of it is computed with, masked or not
  step = jax.jit(lambda p, t, c: model.apply(p, t, c)[0].logits)
  lowered = step.lower(params, jnp.zeros((2, 3), jnp.int32), cache)
  counted = lowered.compile().cost_analysis()["flops"]
  expected = closed_form.pass_flops(SMALL, 2, 3, 32)
  assert expected < counted < 1.3 * expected  # and norms, softmax, rotations


@pytest.fixture(scope="module")
def decoders(small):
  decoder = Decoder(
    small[0],
    drafters.lookup(3, min_ngram=0),
    acceptance.coupled(),
    Params(small[1]),
    jax.random.key(0),
    batch=2,
    prompt_size=6,
    max_new_tokens=9,
  )
  return {"lookup": decoder, runs.BASELINE: decoder.baseline()}


ROWS = [[1, 2, 3], [4, 5, 6, 7]]


def test_all_ways_decode_the_same_texts_and_compile_nothing(decoders):
  batches = batches_of(ROWS, 2)
  with timing.compilations() as first:
    for decoder in decoders.values():
      decoder.warm_up(ROWS)
    runs.compare(decoders, batches)
  assert first.count >= 4  # start and run, each way
  assert first.seconds > 0
  with timing.compilations() as late:
    comparison = runs.compare(decoders, batches, repeats=2)
  assert late.count == 0
  assert first.count >= 4  # a closed count stays as it was
  assert comparison.differences("lookup") == ()
  for results in comparison.results:
    ours, baseline = results.values()
    assert ours.texts == baseline.texts
    assert [len(text) for text in ours.texts] == [9, 9]
    assert ours.seconds > 0 and baseline.seconds > 0
    assert ours.stats.rounds.shape == (2,)
    assert baseline.stats.rounds.tolist() == [9, 9]
  run = comparison.run("lookup", comparable=True)
  assert run.identity.share == 1.0 and run.speed.tokens == 2 * 2 * 9


def test_every_way_goes_first_in_turns():
  """Of every batch from repeat to repeat, and in every repeat from batch to
  batch."""
  calls = []

  def way(name):
    def decode(batch):
      calls.append((batch, name))
      return batch, name

    return decode

  for names, count in (("ab", 2), ("ab", 3), ("abc", 4)):
    calls.clear()
    batches = list(range(count))
    ways = {name: way(name) for name in names}
    done = list(runs.interleave(ways, batches, len(names)))
    assert done == [{n: (b, n) for n in names} for b in batches * len(names)]
    first = calls[:: len(names)]
    assert [b for b, _ in first] == batches * len(names)
    for batch in batches:  # over the repeats, each once
      assert sorted(n for b, n in first if b == batch) == sorted(names)
    once = [name for _, name in first[:count]]
    assert all(x != y for x, y in itertools.pairwise(once))


def test_repeats_may_have_noise_of_their_own():
  numbers = []
  batches = [Batch([[1]], [0]), Batch([[2]], [1])]
  ways = {"a": lambda batch: numbers.append(list(batch.numbers))}
  list(runs.interleave(ways, batches, repeats=2, renumber=2))
  assert numbers == [[0], [1], [2], [3]]


def test_passes_and_acceptance_are_timed(small, decoders):
  timed = timing.pass_timer(*small, 2, 3, 10, 32)
  taken = timing.timing([timed() for _ in range(4)])
  assert 0 < taken.least <= taken.quartiles[0] <= taken.median
  assert taken.median <= taken.quartiles[1]
  assert taken.repeats == 4
  assert timing.time_acceptance(decoders["lookup"], 3).median > 0


def test_passes_and_readings_of_the_bandwidth_take_turns(monkeypatch):
  calls, rates = [], iter([3e9, 1e9, 2e9])

  def timer(name, seconds):
    return lambda: calls.append(name) or seconds

  def reader(size):
    return lambda: calls.append("read") or next(rates)

  monkeypatch.setattr(hardware, "bandwidth_timer", reader)
  timers = [timer(name, name) for name in (1.0, 2.0, 4.0)]
  turns = timing.time_passes(timers, {"w": jnp.ones(4)}, repeats=3)
  np.testing.assert_array_equal(turns.rates, [3e9, 1e9, 2e9])
  np.testing.assert_array_equal(turns.seconds, [3 * [1], 3 * [2], 3 * [4]])
  orders = [calls[i : i + 5] for i in range(0, 15, 5)]
  for read, discarded, *order in orders:
    assert read == "read" and discarded == order[0]
    assert sorted(order) == [1.0, 2.0, 4.0]
  assert len({tuple(order) for order in orders}) > 1


def test_a_time_is_held_against_its_bytes():
  for seconds in (0.011, 0.01, 0.01 * (1 - 0.014)):  # bandwidth itself moves
    assert timing.check_possible("a pass", seconds, 10**9, 1e11) is None
  warning = timing.check_possible("a pass", 0.009, 10**9, 1e11)
  assert "a pass took 9 ms" in warning and "takes 10 ms" in warning
  with pytest.raises(timing.Impossible, match=r"a pass took 4.9 ms.*10 ms"):
    timing.check_possible("a pass", 0.0049, 10**9, 1e11)


def test_a_limit_is_measured_again_before_it_warns(monkeypatch):
  params = {"w": jnp.ones((4, 4))}
  rates = iter([1e11, 0.5e11, 1e11, 2e11])
  monkeypatch.setattr(timing, "bandwidth_of", lambda _: next(rates))
  limit = timing.Limit(params)
  assert limit.check("a pass", 0.01, 10**9) is None
  assert "a pass took 9 ms" in limit.check("a pass", 0.009, 10**9)
  assert limit.check("a pass", 0.012, 10**9) is None
  assert limit.bandwidth == 1e11
  with pytest.raises(timing.Impossible):
    limit.check("a pass", 0.0049, 10**9)


def test_the_loop_holds_weights_caches_and_little_else(decoders):
  slots = 16 * -(-(6 + 9 + 4) // 16)
  least = WEIGHTS + 2 * slots * POSITION
  size = timing.loop_memory(decoders["lookup"])
  # Beside them: distributions of 2 x 4 nodes, several times, and the token
  # buffers.
  assert least < size < least + 20 * 2 * 4 * 4 * SMALL.vocab_size + 10_000
  assert timing.loop_memory(decoders[runs.BASELINE]) < size
  assert timing.peak_memory() > size


def test_forgotten_programs_leave_no_maps():
  maps = pathlib.Path("/proc/self/maps")
  if not maps.exists():
    pytest.skip("this system does not say which memory is mapped")

  def count():
    return len(maps.read_text().splitlines())

  kept = [jax.jit(lambda x, i=i: jnp.sin(x) @ x + i) for i in range(20)]
  timing.forget_programs()
  before = count()
  for program in kept:
    program(jnp.ones((8, 8)))
  full = count()
  timing.forget_programs()
  assert full > before + 20
  assert count() < before + (full - before) / 2
