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
  accept_prob = rule.accept_prob(draft, distribution)[1:]
  np.testing.assert_allclose(accept_prob, expected)
  np.testing.assert_allclose(
    rule.residual(draft, distribution, 3), np.exp(distribution[3]), rtol=1e-6
  )


@pytest.mark.parametrize(
  "rates, temperature", [([0.8], 0.0), ([0.9, 0.3, 0.0], 1.0), ([1.0], 1.0)]
)
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
  measured = metrics.acceptance([jax.tree.map(np.asarray, state.stats)])
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
