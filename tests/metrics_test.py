"""Acceptance quantities, by hand and on simulated texts of a known
distribution.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec
from specdec import decode, step
from specdec.benchmark import metrics
from specdec.testing import table_model
from specdec.types import ACCEPTED, Stats


def stats(rounds):
  """Counts of texts; a text is a list of rounds (drafted, accepted, cut)."""
  depth = max(d for text in rounds for d, _, _ in text)
  columns = {name: [] for name in ("drafted", "accepted", "evaluated")}
  for text in rounds:
    for name in columns:
      columns[name].append(np.zeros(depth, int))
    for drafted, accepted, cut in text:
      columns["accepted"][-1][:accepted] += 1
      refused = accepted < drafted and not cut
      columns["evaluated"][-1][: accepted + refused] += 1
      columns["drafted"][-1][: accepted if cut else drafted] += 1
  emitted = [sum(a + (not cut) for _, a, cut in text) for text in rounds]
  return Stats(
    rounds=np.array([len(text) for text in rounds]),
    emitted=np.array(emitted),
    whole=np.array([len(text) for text in rounds]),
    kept=np.array([sum(a for _, a, _ in text) for text in rounds]),
    nodes=np.array([sum(d for d, _, _ in text) for text in rounds]),
    widths=np.array([0]),
    **{name: np.array(rows) for name, rows in columns.items()},
  )


def test_every_quantity_by_hand():
  # k = 3, one round without a draft, one cut by EOS after its second token.
  text = [(3, 3, False), (3, 1, False), (0, 0, False), (3, 2, True)]
  counts = metrics.acceptance([stats([text])])
  assert counts.texts == 1
  assert counts.target_passes == 4
  assert counts.emitted == 4 + 2 + 1 + 2
  assert (counts.drafted, counts.accepted, counts.wasted) == (9, 6, 3)
  assert counts.tokens_per_pass == metrics.Estimate(9 / 4, None, 1)
  assert counts.accepted_per_drafted.value == 6 / 9
  assert counts.accepted_length.value == 6 / 4
  # The cut round says nothing about position 3.
  assert [s.value for s in counts.prefix_acceptance] == [3 / 3, 2 / 3, 1 / 2]
  assert [c.value for c in counts.conditional] == [3 / 3, 2 / 3, 1 / 1]
  assert counts.alpha.value == 6 / 7
  assert counts.accepted_lengths == (1, 1, 1, 1)


def test_the_metrics_of_vllm_by_hand():
  # k = 3: two full drafts, a round without one, one cut by EOS, a short one.
  texts = [
    [(3, 3, False), (3, 1, False), (0, 0, False), (3, 2, True)],
    [(2, 0, False), (0, 0, False)],
  ]
  counts = metrics.acceptance([stats(texts)])
  assert counts.target_passes == 6
  assert dataclasses.asdict(counts.speculative_decoding) == {
    "mean_acceptance_length": 1 + 6 / 4,
    "draft_acceptance_rate": 6 / 11,
    "acceptance_histogram": (1, 1, 1, 1),
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 11,
    "num_spec_tokens": 3,
  }
  # Ours divides by all rounds, and counts two rounds more without a token.
  assert counts.tokens_per_pass.value == (4 + 2 + 1 + 2 + 1 + 1) / 6
  assert counts.accepted_lengths == (3, 1, 1, 1)


@pytest.mark.parametrize(
  "limit, eos, key", [(40, -1, 3), (39, -1, 3), (40, 4, 2)]
)
def test_the_metrics_of_vllm_are_those_of_a_recount(limit, eos, key):
  """Round by round, by each draft and the origins of the tokens it gave."""
  target, k = table_model.model(5), 3
  parts = (
    target,
    specdec.drafters.lookup(k, min_ngram=1),
    specdec.acceptance.rejection(),
    specdec.Params(table_model.init_params(jax.random.key(0), 5)),
  )
  state = decode.start(
    *parts,
    jnp.array([[1, 2, 3, 4]]),
    jnp.array([4]),
    jax.random.key(key),
    max_length=4 + limit,
    sampling=specdec.settings(1, 0.7),
  )
  histogram, proposed, rounds = np.zeros(k + 1, int), 0, 0
  draft = jax.jit(lambda state: step.draft_step(*parts, state)[0])
  while not state.done[0]:
    count, before = int(draft(state).count[0]) - 1, int(state.length[0])
    state = decode.run(*parts, state, np.array([eos]), 1)
    origins = np.asarray(state.origin[0, before : int(state.length[0])])
    if count:
      histogram[np.sum(origins == ACCEPTED)] += 1
    proposed, rounds = proposed + count, rounds + 1
  if eos >= 0:
    assert state.length[0] < 4 + limit and origins[-1] == ACCEPTED
  counts = metrics.acceptance([jax.tree.map(np.asarray, state.stats)])
  ours = counts.speculative_decoding
  assert ours.acceptance_histogram == (*histogram,)
  assert ours.num_spec_steps == histogram.sum() < rounds == counts.target_passes
  assert ours.num_draft_tokens == proposed
  accepted = int(np.sum(histogram * np.arange(k + 1)))
  assert ours.num_accepted_draft_tokens == accepted > 0
  assert ours.mean_acceptance_length == 1 + accepted / histogram.sum()


def test_nothing_drafted_is_undefined_not_zero():
  counts = metrics.acceptance([stats([[(1, 0, False)]])])
  assert counts.prefix_acceptance[0].value == 0
  nothing = [np.zeros((1, 0), int)] * 3
  baseline = Stats(*[np.array([3])] * 2, *nothing, [3], [0], [0], [3])
  counts = metrics.acceptance([baseline])
  assert counts.tokens_per_pass.value == 1
  assert counts.accepted_per_drafted.value is None
  assert counts.alpha.value is None
  assert counts.accepted_lengths == (3,)
  ours = counts.speculative_decoding
  assert ours.mean_acceptance_length is ours.draft_acceptance_rate is None
  assert ours.acceptance_histogram == (0,) and ours.num_spec_steps == 0
  assert str(counts.alpha) == "-"


def simulated(rng, alpha, k, texts, rounds):
  def one():
    accepted = min(int(rng.geometric(1 - alpha)) - 1, k)
    return k, accepted, False

  return stats([[one() for _ in range(rounds)] for _ in range(texts)])


def test_independent_acceptance_gives_back_its_rate():
  rng, alpha, k = np.random.default_rng(0), 0.8, 4
  counts = metrics.acceptance([simulated(rng, alpha, k, 400, 50)])
  expected = sum(alpha**i for i in range(k + 1))  # 3.3616
  for estimate, value in (
    (counts.tokens_per_pass, expected),
    (counts.alpha, alpha),
    (counts.accepted_per_drafted, (expected - 1) / k),
    (counts.accepted_length, expected - 1),
    *((x, alpha**i) for i, x in enumerate(counts.prefix_acceptance, 1)),
    *((x, alpha) for x in counts.conditional),
  ):
    assert abs(estimate.value - value) < 4 * estimate.error
    assert estimate.error < 0.02
  assert sum(counts.accepted_lengths) == counts.target_passes
  spread = np.repeat(np.arange(k + 1), counts.accepted_lengths)
  assert np.std(spread) == pytest.approx(1.603, abs=0.02)


def assert_errors_are_spreads(estimates, tolerance):
  """Standard errors are those of repeated experiments."""
  spread = np.std([estimate.value for estimate in estimates])
  errors = [estimate.error for estimate in estimates]
  assert np.mean(errors) == pytest.approx(spread, rel=tolerance)


def test_standard_errors_are_those_of_texts_that_differ_in_their_rate():
  rng, k = np.random.default_rng(0), 4
  repeated = [
    metrics.acceptance(
      [simulated(rng, rng.uniform(0.3, 0.95), k, 1, 30) for _ in range(20)]
    )
    for _ in range(300)
  ]
  for name in ("tokens_per_pass", "alpha", "accepted_per_drafted"):
    assert_errors_are_spreads([getattr(x, name) for x in repeated], 0.12)


def test_speedup_is_a_ratio_of_sums_with_the_spread_of_its_pieces():
  speed = metrics.speed(
    [100, 300], [1.0, 3.0], [100, 300], [2.0, 6.0], [0.5, 0.5], [0.1, 0.3]
  )
  assert speed.speedup.value == 2
  assert speed.speedup.error == pytest.approx(0, abs=1e-12)
  assert speed.tokens_per_second == 100
  assert speed.baseline_tokens_per_second == 50
  one = metrics.speed([10], [1.0], [10], [1.5], [1.0], [1.0])
  assert one.speedup == metrics.Estimate(1.5, None, 1)
  rng, tokens, none = np.random.default_rng(0), [64] * 12, np.zeros(12)

  def experiment():
    seconds = rng.lognormal(0, 0.1, 12)
    baseline = 2 * rng.lognormal(0, 0.2, 12)
    return metrics.speed(tokens, seconds, tokens, baseline, none, none).speedup

  assert_errors_are_spreads([experiment() for _ in range(400)], 0.15)


@pytest.mark.parametrize(
  "values, form, text",
  [
    ([], "", "-"),
    ([], ".2f x", "-"),
    ([2.0], "", "2.00"),
    ([2.0], ".2f x", "2.00 x"),
    ([2.0, 2.0], "", "2.00 ± 0.00 (n = 2)"),
    ([1.0, 2.0, 3.0], ".1f x", "2.0 ± 0.6 x (n = 3)"),
    ([0.1, 0.2, 0.3], "+.0%", "+20 ± 6 % (n = 3)"),
    ([1.0, 2.0, 3.0, 2.0], "", "2.00 ± 0.41"),
  ],
)
def test_an_error_of_few_samples_says_how_many(values, form, text):
  assert format(metrics.mean(values), form) == text


def test_the_median_of_pairs_forgets_outliers_and_has_an_error():
  ours, baseline = [1.0, 1.1, 9.0], [2.0, 2.2, 2.1]
  speed = metrics.median_speed(50, ours, baseline, [0.3, 0.2, 0.1], [0.1] * 3)
  assert speed.speedup.value == pytest.approx(2.0)  # of 2.0, 2.0, 0.23
  assert (speed.seconds, speed.baseline_seconds) == (1.1, 2.1)
  assert (speed.prefill_seconds, speed.baseline_prefill_seconds) == (0.2, 0.1)
  assert speed.tokens_per_second == pytest.approx(50 / 1.1)
  drift = np.array([1.0, 1.0, 5.0, 5.0, 5.0])  # slow for a while, both ways
  speed = metrics.median_speed(50, drift, 1.5 * drift, [0] * 5, [0] * 5)
  assert speed.speedup.value == pytest.approx(1.5)
  assert speed.speedup.error == pytest.approx(0, abs=1e-9)
  rng, none = np.random.default_rng(0), [0.0] * 15

  def experiment():
    ours, baseline = rng.lognormal(0, 0.1, (2, 15))
    return metrics.median_speed(50, ours, baseline, none, none).speedup

  assert_errors_are_spreads([experiment() for _ in range(600)], 0.2)


def test_positions_behind_the_limit_are_counted_in_no_round():
  """Neither where the round came so far nor where it was refused before."""
  rows, k, room = 400, 4, 3
  model = table_model.model(5)
  state = specdec.generate(
    model,
    specdec.drafters.lookup(k, min_ngram=0),
    specdec.acceptance.synthetic([0.5]),
    specdec.Params(table_model.init_params(jax.random.key(0), 5)),
    jnp.broadcast_to(jnp.arange(4), (rows, 4)),
    jnp.full((rows,), 4),
    jax.random.key(0),
    max_length=4 + room,
    sampling=specdec.settings(rows),
  )
  counts = metrics.acceptance([jax.tree.map(np.asarray, state.stats)])
  *counted, behind = counts.prefix_acceptance
  assert len(counted) == room and behind.value is None
  for i, share in enumerate(counted, 1):
    assert abs(share.value - 0.5**i) < 4 * share.error


def test_a_round_cut_at_the_limit_counts_its_own_tokens_only():
  target = table_model.model(5)
  weights = table_model.init_params(jax.random.key(0), 5)
  state = specdec.generate(
    target,
    specdec.drafters.model(target, 5),
    specdec.acceptance.coupled(),
    specdec.Params(weights, weights),  # its own draft: all is accepted
    jnp.array([[1, 2, 3]]),
    jnp.array([3]),
    jax.random.key(1),
    max_length=3 + 8,  # a round of six tokens, then one cut after two
    sampling=specdec.settings(1),
  )
  counts = metrics.acceptance([state.stats])
  assert counts.target_passes == 2
  assert counts.tokens_per_pass.value == 8 / 2
  assert counts.accepted_lengths == (0, 0, 1, 0, 0, 1)
  assert counts.alpha.value == 1
