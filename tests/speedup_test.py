"""The formulas of speedup against published tables and exact distributions."""

import itertools

import numpy as np
import pytest

from specdec.report import papers
from specdec.roofline import theory

NAN = float("nan")


@pytest.mark.parametrize("row", papers.LEVIATHAN_1)
def test_leviathans_first_table_exactly(row):
  operations, speed = row.ours()
  assert round(operations, 2) == row.operations
  assert round(speed, 2) == row.speed


@pytest.mark.parametrize("row", papers.LEVIATHAN_2)
def test_leviathans_second_table_within_its_rounding(row):
  """alpha and c are printed with two digits, the speedup with one."""
  low, high = row.span()
  assert low - 0.05 <= row.predicted <= high + 0.05


@pytest.mark.parametrize(
  "row, alpha", list(zip(papers.CHEN, [0.711, 0.749, 0.851]))
)
def test_chens_speedups_and_the_rates_that_they_imply(row, alpha):
  assert round(row.alpha(), 3) == alpha
  # They print 14.1 / 7.52 = 1.875 as 1.92.
  assert row.ours() == pytest.approx(row.baseline / row.milliseconds, abs=2e-3)
  assert row.ours() == pytest.approx(row.speedup, abs=0.046)


@pytest.mark.parametrize("row", papers.SCALING_BOOK)
def test_the_scaling_books_decoding_table(row):
  assert round(row.ours(), 2) == pytest.approx(row.milliseconds, abs=0.011)
  rate = 1e3 * row.batch / row.ours()
  assert rate == pytest.approx(row.tokens_per_second, rel=4e-3)
  assert row.ours(collectives=True) > row.ours()


@pytest.mark.parametrize(
  "curve, cost, sentence",
  [
    ([-0.1], 0.1, r"outside \[0, 1\]"),
    ([0.9, 1.1], 0.1, r"outside \[0, 1\]"),
    ([0.9, NAN], 0.1, r"outside \[0, 1\]"),
    ([0.5, 0.6], 0.1, "ascends"),
    ([0.5, 0.4], -0.5, "cost = -0.5; it must be"),
    ([0.5, 0.4], NAN, "cost = nan; it must be"),
    ([0.5, 0.4], float("inf"), "cost = inf; it must be"),
  ],
)
def test_curves_and_costs_that_cannot_be_are_refused(curve, cost, sentence):
  for function in (theory.speedup, theory.operations):
    with pytest.raises(ValueError, match=sentence):
      function(curve, cost)


@pytest.mark.parametrize("alpha, k", [(-0.1, 2), (1.1, 2), (NAN, 2), (0.5, -1)])
def test_an_acceptance_rate_is_a_share(alpha, k):
  with pytest.raises(ValueError, match=r"outside \[0, 1\]|must be >= 0"):
    theory.iid_prefix_acceptance(alpha, k)


def test_rounds_until_a_text_is_finished_by_enumeration():
  prefix_acceptance, tokens = [0.7, 0.4], 5
  distribution = np.array([0.0, 0.3, 0.3, 0.4])  # of the tokens of a round
  exact = np.zeros(tokens + 1)
  for lengths in itertools.product((1, 2, 3), repeat=tokens):
    rounds = int(np.argmax(np.cumsum(lengths) >= tokens)) + 1
    exact[rounds] += np.prod(distribution[list(lengths)])
  np.testing.assert_allclose(
    theory.finished(prefix_acceptance, tokens), np.cumsum(exact), atol=1e-12
  )


@pytest.mark.parametrize("alpha, cost", [(0.3, 0.05), (0.7, 0.3), (1.0, 0.3)])
def test_a_draft_cheaper_than_its_acceptance_pays(alpha, cost):
  """Leviathan et al., corollary 3.9."""
  curve = theory.iid_prefix_acceptance(alpha, 8)
  best = max(theory.speedup(curve[:k], cost) for k in range(9))
  assert best >= (1 + alpha) / (1 + cost) - 1e-12


def test_latency_of_autoregressive_decoding_is_its_round():
  assert theory.latency([], 0.1, 16) == pytest.approx((0.1, 0.1))
  result = theory.latency([0.5], 0.1, 64)
  assert 0.1 / 1.5 < result.mean < 0.1 / 1.5 * 1.02  # the last round is cut
  assert result.mean < result.p99 < 0.1


def test_a_power_law_goes_through_its_points():
  """LaMDA 137B's drafts, Leviathan et al., table 3."""
  distribution = theory.fit_power_law([1e8, 2e9, 8e9], [0.61, 0.71, 0.75])
  assert distribution.exponent == pytest.approx(0.1, abs=0.01)
  for size, alpha in ((1e8, 0.61), (2e9, 0.71), (8e9, 0.75)):
    assert distribution.alpha(size) == pytest.approx(alpha, abs=0.005)
  for sizes, rates, sentence in (
    ([1e8, 1e8], [0.5, 0.6], "two sizes"),
    ([1e8, 2e8], [0.5, 1.0], r"outside \(0, 1\)"),
    ([1e8, 0.0], [0.5, 0.6], "parameters; it must be finite"),
    ([1e8, NAN], [0.5, 0.6], "parameters; it must be finite"),
  ):
    with pytest.raises(ValueError, match=sentence):
      theory.fit_power_law(sizes, rates)
