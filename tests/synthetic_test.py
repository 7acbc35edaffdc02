"""Synthetic acceptance keeps at the given rates, and says that it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec.benchmark import metrics
from specdec.testing import table_model
from specdec.types import Draft, Params

V = 5


def test_keep_is_the_rate_of_a_nodes_depth():
  parents = np.array([-1, 0, 0, 1, 3, 4])
  draft = Draft(jnp.zeros(6, jnp.int32), parents, None, jnp.array(6))
  distribution = jax.nn.log_softmax(
    jax.random.normal(jax.random.key(0), (6, V))
  )
  rule = acceptance.synthetic([0.9, 0.5, 0.25])
  # The root's own entry means nothing.
  expected = [0.9, 0.9, 0.5, 0.25, 0.25]
  np.testing.assert_allclose(
    rule.accept_prob(draft, distribution)[1:], expected
  )
  np.testing.assert_allclose(
    rule.residual(draft, distribution, 3), np.exp(distribution[3]), rtol=1e-6
  )
  assert not rule.lossless
  assert "meaningless" in rule.caveat


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [[0.8], [0.9, 0.3, 0.0], [1.0]])
def test_what_is_measured_is_what_was_asked_for(rates, temperature):
  rows, k = 64, 4
  model = table_model.model(V)
  params = table_model.init_params(jax.random.key(0), V)
  state = decode.generate(
    model,
    drafters.lookup(k, min_ngram=0),
    acceptance.synthetic(rates),
    Params(params),
    jnp.broadcast_to(jnp.arange(4), (rows, 4)),
    jnp.full((rows,), 4),
    jax.random.key(1),
    max_length=4 + 60,
    sampling=sampling.settings(rows, temperature),
  )
  found = metrics.acceptance([jax.tree.map(np.asarray, state.stats)])
  assert found.drafted == k * found.target_passes  # a draft in every round
  survived = 1.0
  for i, (evaluated, prefix_acceptance) in enumerate(
    zip(found.conditional, found.prefix_acceptance)
  ):
    rate = rates[min(i, len(rates) - 1)]
    survived *= rate
    if survived in (0.0, 1.0):
      assert prefix_acceptance.value == survived
    else:
      assert (
        abs(prefix_acceptance.value - survived) < 4 * prefix_acceptance.error
      )
      assert abs(evaluated.value - rate) < 4 * evaluated.error


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_outside_the_unit_interval_are_refused(rate):
  with pytest.raises(ValueError, match=r"outside \[0, 1\]"):
    acceptance.synthetic([0.5, rate])


def test_no_rate_at_all_is_refused():
  with pytest.raises(ValueError, match="give at least one"):
    acceptance.synthetic([])
