"""Parameter specs agree with the Flax module and with the parameter count."""

import math

import jax
import pytest
from flax import traverse_util

from specdec.models import params, transformer
from specdec.models.config import TransformerConfig

SIZES = dict(
  vocab_size=31,
  num_layers=2,
  width=16,
  mlp_width=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
OPTIONS = {
  "llama": {},
  "tied": dict(tied=True),
  "qwen2": dict(qkv_bias=True),
  "qwen3": dict(qk_norm=True),
  "gemma": dict(post_norms=True, norm_offset=True),
  "mixtral": dict(num_experts=3, experts_per_token=2),
  "qwen3_moe": dict(num_experts=3, experts_per_token=2, qk_norm=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_specs_match_the_module(name):
  config = TransformerConfig(**SIZES, **OPTIONS[name])
  specs = params.specs(config)
  tree = jax.eval_shape(
    lambda key: transformer.init_params(config, key), jax.random.key(0)
  )
  flat = traverse_util.flatten_dict(tree, sep="/")
  assert {path: x.shape for path, x in flat.items()} == {
    path: spec.shape for path, spec in specs.items()
  }
  assert all(len(spec.axes) == len(spec.shape) for spec in specs.values())
  count = sum(math.prod(spec.shape) for spec in specs.values())
  assert count == config.num_parameters
