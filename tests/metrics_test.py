"""Tokens per pass count what was emitted, also where a round was cut."""

import jax
import jax.numpy as jnp

import specdec
from specdec.analysis import metrics
from specdec.models import table


def test_a_round_cut_at_the_limit_counts_its_own_tokens_only():
  target = table.model(5)
  weights = table.init_params(jax.random.key(0), 5)
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
  assert counts["target_passes"] == 2
  assert counts["tokens_per_pass"] == 8 / 2
