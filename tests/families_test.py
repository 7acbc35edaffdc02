"""The options that set the decoder's families apart, and their checkpoints.

The recorded models come from tests/tools/record_parity.py; that their logits
are transformers' own is in transformer_test.py.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specdec import checkpoints
from specdec.checkpoints import hf_config
from specdec.models import experts, transformer
from specdec.models.config import RopeScaling, TransformerConfig

PARITY = Path(__file__).parent / "fixtures" / "parity"
RECORDED = sorted(folder.name for folder in PARITY.iterdir())
CONFIG = TransformerConfig(
  vocab_size=19,
  num_layers=2,
  width=16,
  mlp_width=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
EVERYTHING = {
  "windows": (4, None),
  "local_rope_theta": 50.0,
  "qkv_bias": True,
  "qk_norm": True,
  "query_scalar": 5,
  "attention_softcap": 2.0,
  "logit_softcap": 3.0,
  "post_norms": True,
  "norm_offset": True,
  "scale_embedding": True,
  "activation": "gelu_tanh",
  "num_experts": 4,
  "experts_per_token": 2,
  "tied": True,
}


def changed(config, **changes):
  return TransformerConfig(**(vars(config) | changes))


def one_pass(config, params, tokens):
  model = transformer.model(config)
  cache = model.init_cache(*tokens.shape)
  return jax.jit(model.apply)(params, tokens, cache)[0]


@pytest.mark.parametrize(
  "name, changes",
  [
    ("qwen2_window", {"qkv_bias": False}),
    ("qwen2_window", {"windows": (5, None)}),
    ("qwen3", {"qk_norm": False}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma2", {"query_scalar": None}),
    ("gemma2", {"post_norms": False}),
    ("gemma2", {"norm_offset": False}),
    ("gemma2", {"scale_embedding": False}),
    ("gemma2", {"activation": "silu"}),
    ("gemma2", {"windows": (None, 5)}),
    ("gemma3", {"local_rope_theta": None}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"windows": (None, 5, 5, 5)}),
    ("mixtral", {"experts_per_token": 3}),
    ("mixtral", {"normalize_experts": False}),
    ("qwen3_moe", {"normalize_experts": True}),
    ("qwen3_moe_normalized", {"experts_per_token": 2}),
  ],
)
def test_recorded_logits_would_show_a_mistake(name, changes):
  checkpoint = checkpoints.load(PARITY / name)
  recorded = load_file(PARITY / name / "expected.safetensors")
  config = changed(checkpoint.config, **changes)
  output = one_pass(config, checkpoint.params, recorded["tokens"])
  assert np.abs(output.logits - recorded["logits"]).max() > 1e-2


@pytest.mark.parametrize("name", RECORDED)
def test_saved_as_transformers_saves_it(tmp_path, name):
  checkpoint = checkpoints.load(PARITY / name)
  sizes = [leaf.size for leaf in jax.tree.leaves(checkpoint.params)]
  assert sum(sizes) == checkpoint.config.num_parameters
  checkpoints.save_safetensors(tmp_path, checkpoint.params, checkpoint.config)
  assert checkpoints.inspect(tmp_path) == checkpoint.config
  ours, theirs = (
    load_file(folder / "model.safetensors")
    for folder in (tmp_path, PARITY / name)
  )
  assert ours.keys() == theirs.keys()
  for key, value in theirs.items():
    np.testing.assert_array_equal(ours[key], value, key)
  ours, theirs = (
    json.loads((folder / "config.json").read_text())
    for folder in (tmp_path, PARITY / name)
  )
  for key in ("architectures", "model_type"):
    assert ours[key] == theirs[key]


def test_options_are_independent():
  """All at once: no checkpoint is so, but sizes and cached passes are right."""
  config = changed(CONFIG, **EVERYTHING)
  params = transformer.init_params(config, jax.random.key(0))
  params = jax.tree.map(lambda x: 6 * x + 0.1, params)
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  assert sum(sizes) == config.num_parameters
  tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 19)
  whole = one_pass(config, params, tokens).logits
  assert np.abs(whole).max() < 3
  model = transformer.model(config)
  apply, cache = jax.jit(model.apply), model.init_cache(2, 12)
  for i in range(12):
    output, cache = apply(params, tokens[:, i : i + 1], cache)
    cache = cache.replace(length=cache.length + 1)
    np.testing.assert_allclose(output.logits[:, 0], whole[:, i], atol=2e-5)
  with pytest.raises(ValueError, match="no Hugging Face architecture has"):
    hf_config.render(config)


def test_few_tokens_read_their_experts_only_and_say_the_same():
  config = changed(CONFIG, num_experts=8, experts_per_token=2)
  module = experts.Experts(config)
  x = jax.random.normal(jax.random.key(0), (1, 4, 16))
  params = module.init(jax.random.key(1), x)
  params = jax.tree.map(lambda w: 20 * w, params)
  dense = module.apply(params, x)
  few = jax.jit(module.apply).lower(params, x[:, :2])
  assert "gather" in few.as_text() and dense.std() > 0.1
  got = module.apply(params, x[:, :2])
  np.testing.assert_allclose(got, dense[:, :2], rtol=0, atol=1e-5)


def test_norm_offset_is_exact_in_bfloat16():
  """1 + scale has more bits than bfloat16, so the tree keeps scale."""
  scale = jnp.asarray([0.0131, -0.0007, 0.25, 1.0], jnp.bfloat16)
  norm = transformer.RMSNorm(0.0, offset=True)
  x = jnp.ones((1, 1, 4), jnp.bfloat16) * 256
  got = norm.apply({"params": {"scale": scale}}, x.astype(jnp.float32))
  np.testing.assert_array_equal(got[0, 0], 1 + scale.astype(jnp.float32))
  shapes = jax.eval_shape(norm.init, jax.random.key(0), x)
  assert shapes["params"]["scale"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"windows": (0, 3)}, "each must be None or >= 1"),
    (
      {"query_scalar": 0},
      "query_scalar = 0; it must be None or finite",
    ),
    ({"attention_softcap": 0.0}, "attention_softcap = 0.0; it must be"),
    ({"logit_softcap": -1.0}, "logit_softcap = -1.0; it must be"),
    ({"local_rope_theta": 1e4}, "local_rope_theta = 10000.0 needs layers with"),
    ({"rope_theta": 0.0}, "rope_theta = 0.0; it must be finite and > 0"),
    ({"rope_theta": math.nan}, "rope_theta = nan"),
    ({"rope_theta": -1}, "rope_theta = -1"),
    ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
    ({"norm_epsilon": 0}, "norm_epsilon = 0"),
    ({"norm_epsilon": math.inf}, "norm_epsilon = inf"),
    ({"logit_softcap": math.nan}, "logit_softcap = nan"),
    ({"num_layers": 2.0}, "num_layers = 2.0; it must be an integer >= 1"),
    ({"width": True}, "width = True"),
    ({"activation": "relu"}, "'relu' is unknown; known: silu, gelu_tanh"),
    ({"num_experts": 1}, "num_experts = 1; it must be 0 or > 1"),
    ({"num_experts": 4}, r"experts_per_token = 0 .* in 1\.\.4"),
    ({"experts_per_token": 2}, r"experts_per_token = 2 .* in 0\.\.0"),
  ],
)
def test_config_refusals(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    changed(CONFIG, **changes)


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (("linear", 0), "factor = 0; it must be finite and > 0"),
    (("linear", math.nan), "factor = nan"),
    (("llama3", -1.0), "factor = -1.0"),
    (("llama3", 8.0, 0.0), "low_frequency_factor = 0.0"),
    (("llama3", 8.0, 1.0, math.inf), "high_frequency_factor = inf"),
    (("llama3", 8.0, 4.0, 4.0), "low_frequency_factor = 4.0 must be <"),
    (("llama3", 8.0, 1.0, 4.0, 0), "original_length = 0; it must be an integ"),
    (("yarn", 8.0), "'yarn' is unknown; known: linear, llama3"),
  ],
)
def test_rope_scalings_that_are_refused(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    RopeScaling(*arguments)
