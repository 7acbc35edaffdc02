"""Synthetic acceptance keeps at the given rates, and says that it does."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec.acceptance.synthetic import rates_of_length
from specdec.benchmark import metrics
from specdec.testing import table_model
from specdec.types import Draft, Params

V = 5


def decoded(rule, temperature=0.0, k=4, rows=64, new=60):
  """What 64 texts of drafts in every round amount to, and k."""
  model = table_model.model(V)
  state = decode.generate(
    model,
    drafters.lookup(k, min_ngram=0),
    rule,
    Params(table_model.init_params(jax.random.key(0), V)),
    jnp.broadcast_to(jnp.arange(4), (rows, 4)),
    jnp.full((rows,), 4),
    jax.random.key(1),
    max_length=4 + new,
    sampling=sampling.settings(rows, temperature),
  )
  return metrics.acceptance([jax.tree.map(np.asarray, state.stats)]), k


def test_keep_is_the_rate_of_a_nodes_depth():
  parents = np.array([-1, 0, 0, 1, 3, 4])
  draft = Draft(jnp.zeros(6, jnp.int32), parents, None, jnp.array(6))
  distribution = jax.nn.log_softmax(
    jax.random.normal(jax.random.key(0), (6, V))
  )
  rule = acceptance.synthetic([0.9, 0.5, 0.25])
  # The root's own entry means nothing.
  expected = [0.9, 0.9, 0.5, 0.25, 0.25]
  accept_prob = rule.accept_prob(draft, distribution)[1:]
  np.testing.assert_allclose(accept_prob, expected)
  np.testing.assert_allclose(
    rule.residual(draft, distribution, 3), np.exp(distribution[3]), rtol=1e-6
  )


@pytest.mark.parametrize(
  "rates, temperature", [([0.8], 0.0), ([0.9, 0.3, 0.0], 1.0), ([1.0], 1.0)]
)
def test_what_is_measured_is_what_was_asked_for(rates, temperature):
  measured, k = decoded(acceptance.synthetic(rates), temperature)
  # A draft in every round.
  assert measured.drafted == k * measured.target_passes
  expected = 1.0
  for i, (evaluated, prefix_acceptance) in enumerate(
    zip(measured.conditional, measured.prefix_acceptance)
  ):
    rate = rates[min(i, len(rates) - 1)]
    expected *= rate
    if expected in (0.0, 1.0):
      assert prefix_acceptance.value == expected
    else:
      error = abs(prefix_acceptance.value - expected)
      assert error < 4 * prefix_acceptance.error
      assert abs(evaluated.value - rate) < 4 * evaluated.error


def expected_length(rule, k):
  """1 + accepted tokens of a chain, summed over every outcome of k draws."""
  draft = Draft(jnp.zeros(k + 1, jnp.int32), np.arange(k + 1) - 1, None, None)
  keep = np.asarray(rule.accept_prob(draft, jnp.zeros((k + 1, V))), float)[1:]
  total = 0.0
  for outcome in itertools.product((0, 1), repeat=k):
    share = np.prod(np.where(outcome, keep, 1 - keep))
    accepted = (*outcome, 0).index(0)
    total += share * (1 + accepted)
  return total


@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_expected_length_is_the_one_asked_for(k):
  for length in np.linspace(1, k + 1, 13):
    rule = acceptance.synthetic(length=float(length))
    assert expected_length(rule, k) == pytest.approx(length, abs=1e-6)


@pytest.mark.parametrize(
  "length, unconditional",
  [
    (1.0, [0.0, 0.0, 0.0, 0.0]),
    (1.25, [0.25, 0.0, 0.0, 0.0]),
    (3.5, [1.0, 1.0, 0.5, 0.0]),
    (4.0, [1.0, 1.0, 1.0, 0.0]),
    (5.0, [1.0, 1.0, 1.0, 1.0]),
  ],
)
def test_the_schedule_is_that_of_vllm(length, unconditional):
  """Written down from its docstring, for num_speculative_tokens = 4."""
  rates = [*rates_of_length(length), 0.0, 0.0, 0.0][:4]
  np.testing.assert_allclose(np.cumprod(rates), unconditional)
  assert sum(unconditional) == length - 1


@pytest.mark.parametrize("length", [1.0, 3.2])
def test_the_measured_length_is_the_one_asked_for(length):
  counts, k = decoded(acceptance.synthetic(length=length), new=400)
  ours = counts.speculative_decoding
  # Rounds that the limit cuts accept less: at most one a text.
  cut = 64 * k / ours.num_spec_steps
  error = 4 * 0.5 / np.sqrt(ours.num_spec_steps)
  assert -cut - error <= ours.mean_acceptance_length - length <= error
  whole = counts.accepted_length  # of rounds with room for the draft
  assert abs(1 + whole.value - length) <= 4 * whole.error + 1e-6
  histogram = np.array(ours.acceptance_histogram)
  low = int(length) - 1
  assert histogram[low : low + 2].sum() >= ours.num_spec_steps - 64
