"""Mixtures: both ways of running experts, and what neighbours change."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models.config import TransformerConfig
from specdec.models.experts import Experts

CONFIG = TransformerConfig(
  vocab_size=7,
  num_layers=1,
  width=16,
  mlp_width=12,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  num_experts=6,
  experts_per_token=2,
)


def built(dtype="float32", **options):
  config = dataclasses.replace(CONFIG, dtype=dtype, **options)
  experts = Experts(config)
  x = jax.random.normal(jax.random.key(0), (2, 5, 16), config.dtype)
  params = experts.init(jax.random.key(1), x, True)
  return experts, jax.tree.map(lambda w: 20 * w, params), x


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"normalize_experts": False},
    {"expert_biases": True, "swiglu_limit": 1.0},
    {"route_inputs": True},
  ],
)
def test_chosen_experts_alone_give_what_all_give(options):
  experts, params, x = built(**options)
  leaves, tree = jax.tree.flatten(params)
  leaves = [  # biases start as zeros
    x if x.any() else jax.random.normal(jax.random.key(i), x.shape)
    for i, x in enumerate(leaves)
  ]
  params = jax.tree.unflatten(tree, leaves)
  every, chosen = (experts.apply(params, x, t) for t in (True, False))
  assert np.std(every) > 0.1
  np.testing.assert_allclose(chosen, every, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_depends_on_no_neighbour(dtype):
  experts, params, x = built(dtype)
  other = x.at[1:].set(-3 * x[1:] + 1).at[0, 3:].set(jnp.inf)
  run = jax.jit(lambda x: experts.apply(params, x, False))
  chex.assert_trees_all_equal(run(x)[0, :3], run(other)[0, :3])
  chex.assert_tree_all_finite(run(other)[0, :3])


def test_weights_of_experts_that_none_chose_are_not_read():
  experts, params, x = built()
  one = x[:1, :1]
  scores = params["params"]["router"]["weight"] @ one[0, 0]
  chosen = np.argsort(scores)[-2:]
  spoiled = jax.tree.map(
    lambda w: (
      w if w.ndim == 2 else w.at[np.delete(np.arange(6), chosen)].set(jnp.nan)
    ),
    params,
  )
  whole, part = (experts.apply(p, one, False) for p in (params, spoiled))
  chex.assert_trees_all_equal(whole, part)
