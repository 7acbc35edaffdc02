"""The decoder: what transformers computes, and what its own calls promise.

The recorded models come from tests/tools/record_parity.py.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file

from specdec import checkpoints, draft_tree
from specdec.checkpoints import conversion, hf_config
from specdec.models import layouts, linear, transformer
from specdec.models import params as model_params
from specdec.models.config import OLMO2, TransformerConfig
from specdec.models.parts import GroupRouting, Latent
from specdec.models.rope_scaling import LongRope, RopeScaling, Yarn
from specdec.types import Source

PARITY = Path(__file__).parent / "fixtures" / "parity"
RECORDED = sorted(folder.name for folder in PARITY.iterdir())

CONFIG = TransformerConfig(
  vocab_size=19,
  num_layers=3,
  width=16,
  mlp_width=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
# The windows are less than any text and any path.
WINDOWED = dataclasses.replace(CONFIG, windows=(None, 4, 2))
RELATIVE = dataclasses.replace(CONFIG, relative_buckets=4, relative_distance=5)
LATENT = dataclasses.replace(
  WINDOWED,
  num_kv_heads=1,
  head_dim=10,
  rotary_dims=4,
  latent=Latent(rank=12, key_dim=6, rotary_dims=4, value_dim=5),
)
ALL = pytest.mark.parametrize(
  "config",
  [CONFIG, WINDOWED, RELATIVE, LATENT],
  ids=["full", "windows", "relative", "latent"],
)
TREE = np.array([-1, 0, 0, 0, 1, 1, 3, 4, 7, 8], np.int32)  # five deep
SLOTS = 32

changed = dataclasses.replace


@functools.partial(
  jax.jit,
  static_argnames=("config", "start", "stop", "head", "features"),
)
def run(config, params, tokens, cache, **options):
  return transformer.model(config).apply(params, tokens, cache, **options)


def sharp_params(config):
  """Random weights of a size that makes attention matter."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(config, jax.random.key(0))
  )

  def weight(x):
    values = 0.25 * rng.normal(size=x.shape) + (x.ndim == 1)  # norms near one
    return jnp.asarray(values.astype(x.dtype))

  return jax.tree.map(weight, shapes)


def random_tokens(*shape, seed=0, vocabulary=CONFIG.vocab_size):
  tokens = np.random.default_rng(seed).integers(vocabulary, size=shape)
  return jnp.asarray(tokens, jnp.int32)


def empty(config, batch, slots=SLOTS):
  return transformer.model(config).init_cache(batch, slots)


def committed(config, params, tokens, lengths):
  """A cache that holds the first lengths[b] tokens of each row."""
  _, cache = run(config, params, tokens, empty(config, len(tokens)), head=False)
  return cache.replace(length=jnp.asarray(lengths, jnp.int32))


def close(actual, expected, tolerance=2e-5):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@functools.cache
def recorded(name):
  checkpoint = checkpoints.load(PARITY / name)
  expected = load_file(PARITY / name / "expected.safetensors")
  assert expected["logits"].dtype == np.float32
  return checkpoint, jnp.asarray(expected["tokens"]), expected


def prepared(model, config, expected):
  """An empty cache for a recorded model, which has seen the source if any."""
  cache = empty(config, len(expected["tokens"]))
  if "source" not in expected:
    return cache
  source = Source(expected["source"], expected["source_length"])
  encode = jax.jit(transformer.model(config).encode)
  return cache.replace(cross=encode(model.params, source))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logits_in_passes_of_several_lengths(name):
  """Each row keeps its own number of every eight; the rest is scratch."""
  model, tokens, arrays = recorded(name)
  expected = arrays["logits"]
  size, logits = tokens.shape[1], np.full_like(expected, np.nan)
  cache, start = prepared(model, model.config, arrays), np.array([0, 0])
  for width, kept in [
    (8, (3, 7)),
    (1, (1, 1)),
    (1, (0, 1)),
    *[(8, (3, 7))] * 7,
  ]:
    columns = np.minimum(start[:, None] + np.arange(width), size - 1)
    piece = np.take_along_axis(tokens, columns, axis=1)
    output, cache = run(model.config, model.params, piece, cache)
    np.testing.assert_array_equal(cache.length, start)  # `commit` moves it
    assert output.logits.dtype == jnp.float32
    kept = np.minimum(kept, size - start)
    for row, (first, count) in enumerate(zip(start, kept)):
      logits[row, first : first + count] = output.logits[row, :count]
    start = start + kept
    cache = cache.replace(length=jnp.asarray(start, jnp.int32))
  close(logits, expected, 1e-4)


@pytest.mark.parametrize(
  "name, changes",
  [
    ("llama_mha", {"norm_epsilon": 1e-2}),
    ("llama_gqa_llama3", {"rope_scaling": None}),
    ("llama_gqa_llama3", {"rope_scaling": RopeScaling("linear", 8.0)}),
    ("llama_linear", {"rope_scaling": None}),
    ("qwen3_yarn", {"rope_scaling": Yarn(4.0, 16, 1.0, 2.0, 0.25)}),
    ("qwen3_yarn", {"rope_scaling": RopeScaling("linear", 4.0)}),
    ("qwen2_yarn_mscale", {"rope_scaling": Yarn(4.0, 16, 1.1, 2.0, 0.25)}),
    ("llama_longrope", {"rope_scaling": None}),
    ("mistral_window", {"windows": ()}),
    ("mistral_window", {"windows": (5, 6)}),
    ("qwen2_window", {"qkv_bias": False}),
    ("qwen2_window", {"windows": (5, None)}),
    ("qwen3", {"qk_norm": False}),
    ("phi3_window", {"windows": ()}),
    ("phi3_longrope", {"rope_scaling": None}),
    ("phi3_longrope_short", {"rope_scaling": None}),
    ("olmo2", {"norm_epsilon": 1e-1}),
    ("olmo2", {"rope_theta": 1e4}),
    ("smollm3", {"unrotated_layers": ()}),
    ("smollm3", {"unrotated_layers": (1, 2)}),
    ("smollm3", {"windows": ()}),
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
    ("gemma3_images", {"windows": (None, 5)}),
    ("mixtral", {"experts_per_token": 3}),
    ("mixtral", {"normalize_experts": False}),
    ("qwen3_moe", {"normalize_experts": True}),
    ("qwen3_moe_normalized", {"experts_per_token": 2}),
    ("gpt_oss", {"o_bias": False}),
    ("gpt_oss", {"attention_sinks": False}),
    ("gpt_oss", {"expert_biases": False}),
    ("gpt_oss", {"swiglu_limit": 2.0}),
    ("gpt_oss", {"swiglu_limit": None}),
    ("gpt_oss", {"activation": "silu"}),
    ("gpt_oss", {"windows": (None, 5, None)}),
    ("llama4", {"chunked": False}),
    ("llama4", {"rope_interleaved": False}),
    ("llama4", {"unit_qk_norm": False}),
    ("llama4", {"unrotated_growth": 0.0}),
    ("llama4", {"unrotated_floor": 8}),
    ("llama4", {"experts_per_token": 1}),
    ("deepseek_v3", {"rope_interleaved": False}),
    ("deepseek_v3", {"rope_scaling": Yarn(4.0, 16, 0.9426)}),
    ("deepseek_v3", {"normalize_experts": False}),
    ("deepseek_v3", {"routing": GroupRouting(4, 2, 1.0)}),
    ("deepseek_v3", {"routing": GroupRouting(4, 4, 2.5)}),
    ("deepseek_v3_plain", {"routing": GroupRouting(2, 1, 2.5)}),
    ("qwen3_next", {"attention_gate": False}),
    ("qwen3_next", {"shared_gate": False}),
    ("qwen3_next", {"norm_offset": False}),
    ("qwen3_next", {"normalize_experts": False}),
    ("qwen3_next", {"qk_norm": False}),
    ("qwen3_next", {"rotary_dims": None}),
    ("bamba", {"rotary_dims": None}),
    ("bamba", {"norm_epsilon": 1e-1}),
    ("t5", {"scale_logits": False}),
    ("t5", {"query_scalar": None}),
    ("t5", {"relative_distance": 13}),
    ("t5_gated", {"scale_logits": True}),
    ("t5_gated", {"activation": "silu"}),
    ("t5_gated", {"tied": True}),
    ("mt5", {"encoder_layers": 1}),
  ],
)
def test_recorded_logits_would_show_a_mistake(name, changes):
  model, tokens, expected = recorded(name)
  config = changed(model.config, **changes)
  cache = prepared(model, config, expected)
  output, _ = run(config, model.params, tokens, cache)
  assert np.abs(output.logits - expected["logits"]).max() > 1e-2


def sees(parents, lengths, windows):
  """[B, N, N] bool: node n depends on what enters the layers at node j."""
  num_nodes = len(parents)
  reach = np.broadcast_to(
    np.eye(num_nodes, dtype=int), (len(lengths), *[num_nodes] * 2)
  )
  for window in windows:
    mask = draft_tree.ancestors(parents)
    if window is not None:
      depth = draft_tree.depth(parents)
      mask = mask & (depth[:, None] - depth[None] < window)
    reach = (mask.astype(int) @ reach > 0).astype(int)
  return reach > 0


@ALL
def test_logits_depend_on_ancestors_only(config):
  """By derivatives: exactly zero, or not, where the mask says so."""
  lengths = (0, 6)
  params = sharp_params(config)
  cache = committed(config, params, random_tokens(2, 6), lengths)
  tokens, first = random_tokens(2, 10, seed=1), 1
  shape = (2, 10, config.width)
  hidden = jax.random.normal(jax.random.key(2), shape)
  weights = jax.random.normal(jax.random.key(3), (config.vocab_size,))

  def summary(hidden):
    output, _ = transformer.model(config).apply(
      params, tokens, cache, parents=TREE, start=first, hidden=hidden
    )
    return jnp.sum(output.logits @ weights, axis=0)  # rows do not mix

  slopes = jax.jit(jax.jacrev(summary))(hidden)  # [T, B, T, M]
  depends = np.abs(slopes).max(-1).transpose(1, 0, 2) != 0
  per_layer = (config.windows or (None,) * config.num_layers)[first:]
  np.testing.assert_array_equal(depends, sees(TREE, lengths, per_layer))


@ALL
def test_a_node_is_the_end_of_its_path(config):
  """Each node's logits are those of its path from the root run as a chain."""
  params = sharp_params(config)
  cache = committed(config, params, random_tokens(2, 9), (2, 9))
  tokens = random_tokens(2, len(TREE), seed=1)
  shapes = np.stack([TREE, [-1, 0, 0, 1, 2, 3, 3, 5, 7, 8]]).astype(np.int32)
  output, _ = run(config, params, tokens, cache, parents=jnp.array(shapes))

  # All paths of both rows as one batch of chains, filled up with anything.
  paths, last = [], []
  for row, parents in enumerate(shapes):
    for node in range(len(parents)):
      path = [node]
      while path[0] > 0:
        path.insert(0, int(parents[path[0]]))
      last.append(len(path) - 1)
      filled = (path + [0] * len(parents))[: len(parents)]
      paths.append([int(tokens[row, n]) for n in filled])
  wide = jax.tree.map(lambda x: jnp.repeat(x, len(TREE), axis=0), cache)
  chains, _ = run(config, params, jnp.array(paths), wide)
  ends = chains.logits[np.arange(len(last)), np.array(last)]
  close(output.logits, ends.reshape(output.logits.shape))
  assert max(last) > 4  # deeper than every window


@functools.cache
def text_for_parts():
  """Weights, a draft, and a cache for it: the same for all tests of parts."""
  config, tokens = WINDOWED, random_tokens(2, 6)
  params = sharp_params(config)
  cache = committed(config, params, random_tokens(2, 9, seed=1), (2, 9))
  return config, params, tokens, cache


@pytest.mark.parametrize("split", range(CONFIG.num_layers + 1))
def test_layers_in_two_parts(split):
  config, params, tokens, start = text_for_parts()
  whole, whole_cache = run(config, params, tokens, start)
  lower, cache = run(
    config, params, tokens, start, stop=split, features=(split,)
  )
  for pair in zip(cache.layers[split:], start.layers[split:]):
    jax.tree.map(np.testing.assert_array_equal, *pair)  # not run
  stream = lower.features[0]
  upper, cache = run(config, params, tokens, cache, start=split, hidden=stream)
  close(upper.logits, whole.logits)
  close(upper.hidden, whole.hidden)
  jax.tree.map(close, cache.layers, whole_cache.layers)
  # An early exit's own logits are the head on what it stopped at.
  head, _ = run(
    config, params, tokens, start, start=config.num_layers, hidden=stream
  )
  close(lower.logits, head.logits)


def test_features_are_the_streams_that_enter_and_the_head_may_be_left_out():
  config, params, tokens, start = text_for_parts()
  whole, whole_cache = run(config, params, tokens, start)
  layers = (2, 0, 3, 1)
  output, cache = run(
    config, params, tokens, start, features=layers, head=False
  )
  assert output.logits is None and whole.features == ()
  close(output.hidden, whole.hidden)
  jax.tree.map(close, cache, whole_cache)
  close(whole.hidden @ params["head"]["weight"].T, whole.logits)
  streams = dict(zip(layers, output.features))
  np.testing.assert_array_equal(streams[0], params["embed"]["weight"][tokens])
  for layer, stream in streams.items():
    early, _ = run(config, params, tokens, start, stop=layer, features=(layer,))
    close(stream, early.features[0])


def test_a_choice_is_not_rounded():
  """DeepSeek-V3's biases of experts stay float32, as in transformers."""
  for loaded in (
    checkpoints.load(PARITY / "deepseek_v3", "bfloat16").params,
    transformer.init_params(
      changed(recorded("deepseek_v3")[0].config, dtype="bfloat16"),
      jax.random.key(0),
    ),
  ):
    mlp = loaded["layer_1"]["mlp"]
    assert mlp["choice_bias"].dtype == jnp.float32
    assert mlp["gate"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", ["safetensors", "orbax"])
def test_a_choice_is_not_rounded_by_conversion(layout, tmp_path):
  source, ours = PARITY / "deepseek_v3", tmp_path / "model"
  conversion.convert_model(str(source), layout, ours, "bfloat16")
  expected, written = (
    checkpoints.load(path, "bfloat16").params["layer_1"]["mlp"]
    for path in (source, ours)
  )
  np.testing.assert_array_equal(expected["choice_bias"], written["choice_bias"])
  rounded = expected["choice_bias"].astype(jnp.bfloat16)
  assert np.any(rounded != expected["choice_bias"])


def test_bfloat16():
  config = changed(WINDOWED, dtype="bfloat16")
  params, tokens = sharp_params(config), random_tokens(2, 12)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  output, cache = run(config, params, tokens, empty(config, 2), features=(1,))
  assert output.logits.dtype == jnp.float32
  assert output.hidden.dtype == output.features[0].dtype == jnp.bfloat16
  assert cache.layers[0][0].dtype == jnp.bfloat16
  exact = changed(config, dtype="float32")
  params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  expected, _ = run(exact, params, tokens, empty(exact, 2))
  error = np.abs(output.logits - expected.logits)
  # Rounding to 8 bits (0.4 %) at some ten places of three layers: measured
  # 0.8 % of the spread on average, 4 to 6 % in the worst of 456 numbers.
  spread = np.asarray(expected.logits).std()
  assert 1e-4 * spread < error.mean() < 0.02 * spread, error.mean() / spread
  assert error.max() < 0.2 * spread, error.max() / spread


FAMILIES = {
  "llama": {},
  "tied": {"tied": True},
  "one_head": {"num_kv_heads": 1, "head_dim": 6, "num_layers": 1},
  "bfloat16": {"num_kv_heads": 4, "vocab_size": 7, "dtype": "bfloat16"},
  "qwen2": {"qkv_bias": True},
  "qwen3": {"qk_norm": True},
  "gemma": {"post_norms": True, "norm_offset": True},
  "olmo2": OLMO2,
  "phi4": {"rotary_dims": 6, "fused": True},
  "mixtral": {"num_experts": 3, "experts_per_token": 2},
  "qwen3_moe": {"num_experts": 3, "experts_per_token": 2, "qk_norm": True},
  "gpt_oss": {
    "num_experts": 3,
    "experts_per_token": 2,
    "expert_biases": True,
    "qkv_bias": True,
    "o_bias": True,
    "attention_sinks": True,
    "swiglu_limit": 1.0,
  },
  "llama4": {
    "num_layers": 3,
    "num_experts": 3,
    "experts_per_token": 1,
    "route_inputs": True,
    "dense_layers": (1,),
    "dense_width": 11,
    "shared_width": 5,
  },
  "deepseek_v3": {
    "num_kv_heads": 1,
    "head_dim": 10,
    "rotary_dims": 4,
    "latent": Latent(12, 6, 4, 5, query_rank=7),
    "num_experts": 4,
    "experts_per_token": 2,
    "routing": GroupRouting(2, 1),
    "dense_layers": (0,),
    "dense_width": 11,
    "shared_width": 5,
  },
  "relative": {"relative_buckets": 8, "head_dim": 7},
  "ungated": {"gated": False, "activation": "relu"},
  "t5": {"relative_buckets": 8, "encoder_layers": 2, "num_kv_heads": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_parameters_and_cache(family):
  config = changed(CONFIG, **FAMILIES[family])
  shapes = jax.eval_shape(
    lambda: transformer.init_params(config, jax.random.key(0))
  )
  flat = traverse_util.flatten_dict(shapes, sep="/")
  specs = model_params.specs(config)
  assert {path: x.shape for path, x in flat.items()} == {
    path: spec.shape for path, spec in specs.items()
  }
  assert all(len(spec.axes) == len(spec.shape) for spec in specs.values())
  assert sum(x.size for x in flat.values()) == config.num_parameters
  cache = empty(config, 2, 5)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
  assert size == 2 * 5 * config.cache_bytes_per_token
  assert cache.num_slots == 5


def test_options_are_independent():
  """All at once: no checkpoint is so, but sizes and cached passes are right."""
  config = changed(
    CONFIG,
    num_layers=2,
    windows=(4, None),
    local_rope_theta=50.0,
    qkv_bias=True,
    qk_norm=True,
    query_scalar=5,
    attention_softcap=2.0,
    logit_softcap=3.0,
    post_norms=True,
    norm_offset=True,
    scale_embedding=True,
    activation="gelu_tanh",
    num_experts=4,
    experts_per_token=2,
    tied=True,
  )
  params = sharp_params(config)
  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  assert sum(sizes) == config.num_parameters
  tokens = random_tokens(2, 12)
  whole = run(config, params, tokens, empty(config, 2))[0].logits
  assert np.abs(whole).max() < 3
  cache = empty(config, 2)
  for i in range(12):
    output, cache = run(config, params, tokens[:, i : i + 1], cache)
    cache = cache.replace(length=cache.length + 1)
    close(output.logits[:, 0], whole[:, i])
  with pytest.raises(ValueError, match="no Hugging Face architecture has"):
    hf_config.render(config)


def test_packed_routers_choose_the_same_experts():
  config = changed(CONFIG, num_layers=1, num_experts=16, experts_per_token=2)
  params, tokens = sharp_params(config), random_tokens(1, 4)
  expected, _ = run(config, params, tokens, empty(config, 1))
  packed = layouts.pack(params, "cpu")
  assert packed["layer_0"]["mlp"]["router"]["weight"].ndim == 3
  output, _ = run(config, packed, tokens, empty(config, 1))
  close(output.logits, expected.logits)


def test_norm_offset_is_exact_in_bfloat16():
  """1 + scale has more bits than bfloat16, so the tree keeps scale."""
  scale = jnp.asarray([0.0131, -0.0007, 0.25, 1.0], jnp.bfloat16)
  norm = linear.RMSNorm(0.0, offset=True)
  x = jnp.ones((1, 1, 4), jnp.bfloat16) * 256
  y = norm.apply({"params": {"scale": scale}}, x.astype(jnp.float32))
  np.testing.assert_array_equal(y[0, 0], 1 + scale.astype(jnp.float32))
  shapes = jax.eval_shape(norm.init, jax.random.key(0), x)
  assert shapes["params"]["scale"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
  "name, field, value",
  [
    ("llama_longrope", "max_length", 16),  # the short factors
    ("llama_longrope", "attention_factor", 1.0),
    ("phi3_longrope", "max_length", 16),
    ("phi3_longrope_short", "max_length", 65),
    ("qwen2_yarn_mscale", "truncate", True),
    ("qwen2_yarn_mscale", "beta_fast", 32.0),
  ],
)
def test_recorded_logits_depend_on_the_scaling(name, field, value):
  config = recorded(name)[0].config
  scaling = changed(config.rope_scaling, **{field: value})
  test_recorded_logits_would_show_a_mistake(name, {"rope_scaling": scaling})


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"windows": (0, 3, 3)}, "each must be None or >= 1"),
    ({"query_scalar": 0}, "query_scalar = 0; it must be None or finite"),
    ({"logit_softcap": math.nan}, "logit_softcap = nan"),
    ({"local_rope_theta": 1e4}, "local_rope_theta = 10000.0 needs layers with"),
    ({"rope_theta": 0.0}, "rope_theta = 0.0; it must be finite and > 0"),
    ({"rope_theta": math.nan}, "rope_theta = nan"),
    ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
    ({"norm_epsilon": math.inf}, "norm_epsilon = inf"),
    ({"num_layers": 2.0}, "num_layers = 2.0; it must be an integer >= 1"),
    ({"width": True}, "width = True"),
    ({"activation": "gelu"}, "'gelu' is unknown; known: silu, gelu_tanh, relu"),
    ({"relative_buckets": 6}, "relative_buckets = 6 up to relative_distance"),
    ({"encoder_layers": 1}, "an encoder needs relative_buckets"),
    ({"encoder_layers": -1}, "encoder_layers = -1; it must be >= 0"),
    ({"start_token": 19}, r"start_token = 19; it must be in 0\.\.18"),
    ({"num_experts": 1}, "num_experts = 1; it must be 0 or > 1"),
    ({"num_experts": 4}, r"experts_per_token = 0 .* in 1\.\.4"),
    ({"experts_per_token": 2}, r"experts_per_token = 2 .* in 0\.\.0"),
    ({"rope_scaling": ("linear", 0)}, "factor = 0; it must be finite and > 0"),
    ({"rope_scaling": ("llama3", 8.0, 0.0)}, "low_frequency_factor = 0.0"),
    ({"rope_scaling": ("llama3", 8.0, 1.0, math.inf)}, "cy_factor = inf"),
    ({"rope_scaling": ("llama3", 8.0, 5.0, 4.0)}, "cy_factor = 5.0 must be <="),
    ({"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 0)}, "original_length = 0; it"),
    ({"rope_scaling": ("ntk", 8.0)}, "'ntk' is unknown; known: linear, llama"),
    (
      {"rotary_dims": 3},
      r"rotary_dims = 3; it must be even and in 2..head_dim",
    ),
    ({"unrotated_layers": (3,)}, r"unrotated_layers = \(3,\); each must be in"),
    ({"fused": True, "qkv_bias": True}, "and no biases"),
    ({"joint_qk_norm": True}, "joint_qk_norm = True needs qk_norm"),
    ({"pre_norms": False}, "pre_norms = False needs post_norms"),
    ({"rotary_dims": 10}, "rotary_dims = 10; it must be even"),
    ({"rotary_dims": 0}, "rotary_dims = 0; it must be even"),
  ],
)
def test_configs_that_are_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    scaling = changes.get("rope_scaling", ("linear", 1.0))
    changed(CONFIG, **changes | {"rope_scaling": RopeScaling(*scaling)})


def test_scalings_that_are_refused():
  with pytest.raises(ValueError, match=r"beta_slow = 3\.0 must be <= beta_f"):
    Yarn(4.0, 16, 1.0, 2.0, 3.0)
  with pytest.raises(ValueError, match="attention_factor = nan; it must be"):
    Yarn(4.0, 16, math.nan)
  with pytest.raises(ValueError, match="2 short_factors and 1 long_factors"):
    LongRope((1.0, 1.0), (1.0,), 8, 16, 1.0)
  with pytest.raises(ValueError, match="long_factors = inf; it must be finite"):
    LongRope((1.0,), (math.inf,), 8, 16, 1.0)
  assert LongRope((1.0,), (2.0,), 8, 8, 1.0).factors == (1.0,)
  assert LongRope((1.0,), (2.0,), 8, 9, 1.0).factors == (2.0,)
