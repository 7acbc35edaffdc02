"""Config files: defaults of each architecture, options, refusals."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest

from specdec.checkpoints import hf_config, t5_config
from specdec.models import presets
from specdec.models.config import TransformerConfig
from specdec.models.rope_scaling import LongRope, RopeScaling, Yarn

PARITY = Path(__file__).parent / "fixtures" / "parity"

BASE = {
  "vocab_size": 8,
  "num_hidden_layers": 8,
  "hidden_size": 64,
  "intermediate_size": 16,
  "num_attention_heads": 32,
}


def parse(architecture, **changes) -> TransformerConfig:
  config = {**BASE, "architectures": [architecture], **changes}
  return hf_config.parse(config, "config.json", "float32")


GEMMA = {"head_dim": 256, "num_kv_heads": 4, "query_scalar": 256, "tied": True}


@pytest.mark.parametrize(
  "architecture, fields",
  [
    ("Llama", {"head_dim": 2, "num_kv_heads": 32}),
    ("Mistral", {"windows": (4096,) * 8, "num_kv_heads": 8}),
    ("Qwen2", {"head_dim": 2, "num_kv_heads": 32, "qkv_bias": True}),
    ("Qwen3", {"head_dim": 128, "num_kv_heads": 32, "qk_norm": True}),
    ("Phi3", {"head_dim": 2, "num_kv_heads": 32, "norm_epsilon": 1e-5,
              "rope_scaling": None, "fused": True}),
    ("Olmo2", {"head_dim": 2, "num_kv_heads": 32, "norm_epsilon": 1e-5,
               "pre_norms": False, "post_norms": True, "qk_norm": True,
               "joint_qk_norm": True}),
    ("SmolLM3", {"num_kv_heads": 4, "rope_theta": 2e6, "tied": True,
                 "unrotated_layers": (3, 7)}),
    ("Gemma2", GEMMA | {"windows": (4096, None) * 4, "attention_softcap": 50.0,
                        "logit_softcap": 30.0}),
    ("Gemma3", GEMMA | {"windows": (4096,) * 5 + (None,) + (4096,) * 2,
                        "rope_theta": 1e6, "local_rope_theta": 1e4,
                        "qk_norm": True, "logit_softcap": None}),
    ("Mixtral", {"num_kv_heads": 8, "rope_theta": 1e6, "norm_epsilon": 1e-5,
                 "num_experts": 8, "experts_per_token": 2,
                 "normalize_experts": True}),
    ("Qwen3Moe", {"num_kv_heads": 4, "head_dim": 2, "num_experts": 128,
                  "experts_per_token": 8, "normalize_experts": False,
                  "mlp_width": 768}),
    ("Llama4", {"num_kv_heads": 8, "head_dim": 128, "norm_epsilon": 1e-5,
                "rope_theta": 500_000.0, "unrotated_layers": (3, 7),
                "windows": (*[8192] * 3, None) * 2, "chunked": True,
                "num_experts": 16, "experts_per_token": 1, "dense_layers": (),
                "shared_width": 16, "unit_qk_norm": True, "route_inputs": True,
                "unrotated_growth": 0.1, "unrotated_floor": 8192,
                "rope_interleaved": True}),
    ("GptOss", {"num_kv_heads": 8, "head_dim": 64, "norm_epsilon": 1e-5,
                "rope_theta": 150_000.0, "windows": (128, None) * 4,
                "num_experts": 128, "experts_per_token": 4, "qkv_bias": True,
                "o_bias": True, "attention_sinks": True, "swiglu_limit": 7.0,
                "expert_biases": True, "activation": "quick_gelu",
                "rope_scaling": Yarn(32.0, 4096, 1 + 0.1 * math.log(32),
                                     truncate=False)}),
  ],
)  # fmt: skip
def test_absent_keys_have_the_defaults_of_transformers(architecture, fields):
  config = parse(f"{architecture}ForCausalLM")
  defaults = {"rope_theta": 1e4, "norm_epsilon": 1e-6, "windows": ()}
  for name, value in (defaults | {"tied": False} | fields).items():
    assert getattr(config, name) == value, name


def test_no_rope_parameters_are_yarn_to_gpt_oss():
  """As transformers has it; a scaling of kind default is none."""
  absent, null = parse("GptOssForCausalLM"), {"rope_parameters": None}
  assert parse("GptOssForCausalLM", **null) == absent
  default = {"rope_parameters": {"rope_type": "default"}}
  assert parse("GptOssForCausalLM", **default).rope_scaling is None


def test_a_head_of_a_model_with_images():
  for name, expected in (("Gemma3", True), ("Llama4", False)):
    for tied in (None, True, False):
      given = {} if tied is None else {"tie_word_embeddings": tied}
      config = {"architectures": [f"{name}ForConditionalGeneration"]}
      config |= {"text_config": BASE} | given
      parsed = hf_config.parse(config, "config.json", "float32")
      assert parsed.tied == (expected if tied is None else tied)


def test_an_option_of_transformers_5_is_written_where_it_is_needed():
  """Version 4 would scale the logits of every model with a tied head."""
  config = TransformerConfig(
    8, 2, 8, 8, 2, 2, 4, relative_buckets=4, encoder_layers=2, query_scalar=1.0
  )
  for tied, scaled, written in (
    (True, False, False),
    (False, True, True),
    (True, True, None),
    (False, False, None),
  ):
    changed = dataclasses.replace(config, tied=tied, scale_logits=scaled)
    rendered = t5_config.render(changed)
    assert rendered.get("scale_decoder_outputs") is written


@pytest.mark.parametrize("name", ["T5", "MT5"])
def test_one_architecture_needs_no_list(name):
  sizes = {"vocab_size": 8, "d_model": 8, "d_ff": 8, "num_heads": 2}
  sizes |= {"num_layers": 2, "d_kv": 4}
  architecture = f"{name}ForConditionalGeneration"
  alone, listed = (
    hf_config.parse(sizes | {"architectures": x}, "config.json", "float32")
    for x in (architecture, [architecture])
  )
  assert alone == listed and alone.gated == (name == "MT5")


@pytest.mark.parametrize(
  "architecture, changes, fields",
  [
    ("Llama", {"rope_parameters": {"rope_theta": 7e4}}, {"rope_theta": 7e4}),
    ("Llama", {"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 2}},
     {"rope_scaling": RopeScaling("linear", 2.0)}),
    # As Qwen's model cards ask for it.
    ("Qwen2",
     {"rope_scaling": {"type": "yarn", "factor": 4.0,
                       "original_max_position_embeddings": 32768}},
     {"rope_scaling": Yarn(4.0, 32768, 1 + 0.1 * math.log(4))}),
    # As DeepSeek-R1's distillations would, with what is missing derived.
    ("Llama",
     {"max_position_embeddings": 64,
      "original_max_position_embeddings": 8,
      "rope_parameters": {"rope_type": "yarn", "factor": None, "mscale": 2.0,
                          "mscale_all_dim": 1.0, "beta_fast": 16,
                          "truncate": False}},
     {"rope_scaling": Yarn(
       8.0, 8, (1 + 0.2 * math.log(8)) / (1 + 0.1 * math.log(8)), 16,
       truncate=False)}),
    ("Llama",
     {"max_position_embeddings": 8, "rope_scaling": {
       "type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
     {"rope_scaling": Yarn(2.0, 8, 1.5)}),
    ("Llama",
     {"max_position_embeddings": 64, "rope_scaling": {
       "type": "longrope", "original_max_position_embeddings": 8,
       "short_factor": [1], "long_factor": [9.0]}},
     {"rope_scaling": LongRope(
       (1.0,), (9.0,), 8, 64, math.sqrt(1 + math.log(8) / math.log(8)))}),
    ("Llama", {"sliding_window": 9}, {"windows": ()}),
    ("Llama", {"head_dim": None}, {"head_dim": 2}),
    ("Mistral", {"sliding_window": None, "num_key_value_heads": 4},
     {"windows": (), "num_kv_heads": 4}),
    (
      "Qwen3",
      {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 6},
      {"windows": (None,) * 6 + (7, 7)},
    ),
    ("Qwen3", {"sliding_window": 7}, {"windows": ()}),
    # As Phi-3's first files name it: the ratio of lengths stands for a factor,
    # and the length outside goes before that in the object.
    ("Phi3",
     {"hidden_size": 256, "partial_rotary_factor": 0.5,
      "max_position_embeddings": 16, "original_max_position_embeddings": 4,
      "sliding_window": 3, "rope_scaling": {
        "type": "su", "original_max_position_embeddings": 5,
        "short_factor": [1.0, 2], "long_factor": [3.0, 4.0]}},
     {"rotary_dims": 4, "windows": (3,) * 8, "rope_scaling": LongRope(
       (1.0, 2.0), (3.0, 4.0), 4, 16, math.sqrt(2.0))}),
    ("Phi3", {"hidden_size": 32 * 96, "partial_rotary_factor": 0.26},
     {"rotary_dims": 24}),
    ("SmolLM3", {"no_rope_layers": [1] * 5 + [0, 1, 1, 0]},
     {"unrotated_layers": (5,)}),
    ("SmolLM3", {"no_rope_layers": [True] * 8}, {"unrotated_layers": ()}),
    ("SmolLM3", {"no_rope_layer_interval": 3, "use_sliding_window": True,
                 "sliding_window": 9},
     {"unrotated_layers": (2, 5),
      "windows": (None, None, 9, None, None, 9, None, None)}),
    (
      "Qwen3Moe",
      {"use_sliding_window": True, "sliding_window": 7, "num_local_experts": 4,
       "num_experts_per_tok": 2},
      {"windows": (7,) * 8, "num_experts": 4},
    ),
    (
      "Gemma2",
      {"layer_types": ["full_attention"] * 7 + ["sliding_attention"]},
      {"windows": (None,) * 7 + (4096,)},
    ),
    # As the hub's Gemma 3 has it, and as transformers 5 writes it.
    ("Gemma3",
     {"sliding_window_pattern": 4, "rope_theta": 5e5,
      "rope_local_base_freq": 5e3,
      "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     {"windows": ((4096,) * 3 + (None,)) * 2, "rope_theta": 5e5,
      "local_rope_theta": 5e3, "rope_scaling": RopeScaling("linear", 8.0)}),
    ("Gemma3",
     {"rope_parameters": {
       "full_attention": {"rope_type": "linear", "factor": 8.0},
       "sliding_attention": {"rope_theta": 5e3}},
      "layer_types": ["full_attention"] * 8},
     {"windows": (), "rope_theta": 1e6, "local_rope_theta": None,
      "rope_scaling": RopeScaling("linear", 8.0)}),
  ],
)  # fmt: skip
def test_options_are_carried(architecture, changes, fields):
  config = parse(f"{architecture}ForCausalLM", **changes)
  for name, value in fields.items():
    assert getattr(config, name) == value, name
  assert hf_config.parse(hf_config.render(config), "", "float32") == config


YARN = {"max_position_embeddings": 64}


PUBLISHED = {  # what is in config.json, but for what says nothing of the model
  "smollm3-3b": ("SmolLM3", {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 28,
    "layer_types": ["full_attention"] * 36, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
  }),
  "phi3-mini": ("Phi3", {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "sliding_window": 2047, "attention_bias": False,
  }),
  "phi4": ("Phi3", {
    "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
    "original_max_position_embeddings": 16384, "rope_theta": 250000,
    "rope_scaling": None, "sliding_window": None,
  }),
  "olmo2-7b": ("Olmo2", {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 500000, "rope_scaling": None, "attention_bias": False,
  }),
  "gpt-oss-20b": ("GptOss", {
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "max_position_embeddings": 131072,
    "initial_context_length": 4096, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": {
      "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
      "original_max_position_embeddings": 4096, "truncate": False,
    },
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
    "tie_word_embeddings": False,
  }),
  "deepseek-v3": ("DeepseekV3", {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "rope_scaling": {
      "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
      "mscale": 1.0, "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096,
    },
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "attention_bias": False,
    "tie_word_embeddings": False,
  }),
  "llama4-scout": ("Llama4", {
    "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
    "intermediate_size_mlp": 16384, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
    "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": {
      "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0,
      "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    },
    "attention_chunk_size": 8192, "attn_temperature_tuning": True,
    "attn_scale": 0.1, "floor_scale": 8192, "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0] * 12, "interleave_moe_layer_step": 1,
    "moe_layers": [*range(48)], "num_local_experts": 16,
    "num_experts_per_tok": 1, "attention_bias": False,
    "tie_word_embeddings": False,
  }),
  "qwen3-30b-a3b": ("Qwen3Moe", {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False,
    "tie_word_embeddings": False,
  }),
  "qwen3-next-80b-a3b": ("Qwen3Next", {
    "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_theta": 10000000, "rope_scaling": None, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False,
    "tie_word_embeddings": False,
  }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_presets(name):
  architecture, config = PUBLISHED[name]
  config = {"architectures": [f"{architecture}ForCausalLM"]} | config
  assert hf_config.parse(config, "", "float32") == presets.get(name)


def test_phi4_mini_has_the_factors_of_long_texts():
  architecture, config = PUBLISHED["phi3-mini"]
  config = {"architectures": [f"{architecture}ForCausalLM"]} | config | {
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064,
    "max_position_embeddings": 131072, "partial_rotary_factor": 0.75,
    "sliding_window": 262144, "tie_word_embeddings": True,
    "rope_scaling": {
      "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
    },
  }  # fmt: skip
  parsed = hf_config.parse(config, "", "float32")
  scaling = parsed.rope_scaling
  assert scaling.factors == (2.0,) * 48
  assert scaling.attention_factor == pytest.approx(1.1902, abs=1e-4)
  same = dataclasses.replace(parsed, rope_scaling=None)
  assert same == presets.get("phi4-mini")
  # As docs/checkpoints.md has it for short texts.
  config["max_position_embeddings"] = 4096
  config["rope_scaling"]["attention_factor"] = scaling.attention_factor
  short = hf_config.parse(config, "", "float32").rope_scaling
  assert short.factors == (1.0,) * 48
  assert short.attention_factor == scaling.attention_factor


def test_the_text_of_a_model_that_sees_images():
  """As config.json of google/gemma-3-4b-it, whose sizes are mostly missing."""
  config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
      "hidden_size": 2560,
      "intermediate_size": 10240,
      "model_type": "gemma3_text",
      "num_hidden_layers": 34,
      "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
      "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
  }
  assert hf_config.parse(config, "", "float32") == presets.get("gemma3-4b")
  untied = config | {"tie_word_embeddings": False}
  assert not hf_config.parse(untied, "", "float32").tied
  with pytest.raises(ValueError, match="text_config = 1; it must be an object"):
    hf_config.parse(config | {"text_config": 1}, "config.json", "float32")
  bidirectional = {"text_config": {"use_bidirectional_attention": True}}
  with pytest.raises(ValueError, match="use_bidirectional_attention = True"):
    hf_config.parse(config | bidirectional, "config.json", "float32")


LOCAL = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
  "architecture, changes, sentence",
  [
    ("Phi", {}, "PhiForCausalLM; accepted: Llama"),
    ("Llama", {"architectures": None}, "architecture unknown; accepted"),
    ("Qwen3", {"attention_bias": True}, "attention_bias = True; accepted"),
    ("Llama", {"mlp_bias": True}, "json has mlp_bias = True; accepted"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; accepted: 'silu'"),
    ("Llama", {"rope_scaling": {"type": "dynamic"}},
     "'dynamic'; accepted: default, linear, llama3, yarn, longrope"),
    ("Llama", {"rope_scaling": {"type": "yarn"}}, "lacks original_max_posi"),
    ("Llama", YARN | {"rope_scaling": {
      "type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -1e30}},
     "attention_factor = -"),
    ("Llama", YARN | {"rope_scaling": {"type": "yarn", "factor": "4"}},
     "factor = '4'; it must be a number"),
    ("Llama", YARN | {"rope_scaling": {"type": "yarn", "beta_slow": 33}},
     "beta_slow = 33 must be <= beta_fast = 32.0"),
    ("Llama", YARN | {"rope_scaling": {"type": "yarn", "factor": 4},
                      "rope_theta": 1.0}, "theta = 1.0; yarn needs one above"),
    ("Llama", YARN | {"rope_scaling": {"type": "longrope"}}, "lacks short_fac"),
    ("Llama", YARN | {"rope_scaling": {
      "type": "longrope", "short_factor": [1, 2], "long_factor": [1, 2]}},
     "longrope has 2 factors for 1 pairs of rotated"),
    ("Llama", YARN | {"rope_scaling": {
      "type": "longrope", "short_factor": [0], "long_factor": [1]}},
     "short_factor = 0.0; it must be finite and > 0"),
    ("Llama", YARN | {"rope_scaling": {
      "type": "longrope", "short_factor": ["1"], "long_factor": [1]}},
     r"short_factor = \['1'\]; it must be a list of numbers"),
    ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
     "lacks low_freq"),
    ("Llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
    ("Llama", {"hidden_size": None}, "hidden_size = None; it must be an integ"),
    ("Llama", {"num_key_value_heads": 3}, "attention_heads = 32 is not a m"),
    ("Qwen3", {"layer_types": ["full_attention"]}, "or full_attention for"),
    ("Qwen2", {"layer_types": ["chunked_attention"] * 8}, "layer_types = "),
    ("Qwen2", {"layer_types": ["sliding_attention"] * 8}, "window = False"),
    ("Gemma3", {"sliding_window": None}, "and no sliding_window"),
    ("Gemma2", {"sliding_window": None}, "and no sliding_window"),
    ("Gemma2", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
    ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
    ("Gemma3", {"rope_parameters": LOCAL}, "of sliding_attention; accepted"),
    ("Gemma3", {"rope_parameters": {"rope_theta": 1}}, "rope_theta in rope_pa"),
    ("Llama", {"rope_parameters": LOCAL}, "frequencies for sliding_attention"),
    ("Llama", {"rope_theta": None}, "rope_theta = None; it must be a number"),
    (
      "Llama",
      {"rope_parameters": {"partial_rotary_factor": 0.5}},
      "partial_rotary_factor = 0.5; accepted: 1.0",
    ),
    ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}},
     "by 'linear'; accepted: default, longrope"),
    ("Phi3", {"partial_rotary_factor": 0.5}, "rotary_dims = 1; it must be e"),
    ("SmolLM3", {"no_rope_layers": [1] * 7}, r"_layers = \[1, .*accepted"),
    ("SmolLM3", {"no_rope_layers": [2] * 8}, "accepted: 1 with rotary"),
    ("SmolLM3", {"no_rope_layer_interval": 0}, "interval = 0; it must be >= 1"),
    ("Qwen3Moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\];"),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2;"),
    ("Mixtral", {"num_local_experts": 1}, "num_local_experts = 1; it must"),
    ("Gemma3", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar = None"),
    ("Llama", {"num_hidden_layers": 10**9}, "layers = 1,000,000,000; at most"),
    ("Mixtral", {"num_local_experts": 10**9}, "at most 131,072 experts in all"),
    ("Llama", {"num_hidden_layers": "8"}, "layers = '8'; it must be an int"),
    ("Llama", {"num_attention_heads": 32.0}, "heads = 32.0; it must be an int"),
    ("Llama", {"hidden_size": 10**400}, "hidden_size = 10+; it must be"),
    ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; it must be"),
    ("Llama", {"rope_scaling": [1]}, r"rope_scaling = \[1\]; it must be an o"),
    ("Llama", {"rope_scaling": {"type": ["x"]}}, r"frequencies by \['x'\]"),
    ("Llama", {"tie_word_embeddings": "no"}, "'no'; it must be true or false"),
    ("Llama", {"architectures": {"x": 1}}, "is of architecture"),
    ("Qwen2", {"layer_types": [[]] * 8}, "layer_types = "),
    ("Gemma3", {"sliding_window_pattern": 0}, "pattern = 0; it must be >= 1"),
    ("Llama", {"head_dim": 0}, "n: head_dim = 0; it must be an int"),
  ],
)  # fmt: skip
def test_unsupported_options_are_refused(architecture, changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    parse(f"{architecture}ForCausalLM", **changes)


def test_render_names_what_no_architecture_has():
  changed = functools.partial(dataclasses.replace, parse("LlamaForCausalLM"))
  with pytest.raises(ValueError, match=r"Llama.* and differs in windows"):
    hf_config.render(changed(windows=(3, 4) * 4))
  with pytest.raises(ValueError, match=r"Qwen2.* differs in qk_norm"):
    hf_config.render(changed(qkv_bias=True, qk_norm=True))
  rendered = hf_config.render(changed(windows=(None,) * 8))
  assert rendered["architectures"] == ["LlamaForCausalLM"]


def test_a_mistral_of_mixed_windows_is_refused():
  """transformers takes it for another architecture."""
  config = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 4}
  slides = ["sliding_attention"] * BASE["num_hidden_layers"]
  listed = hf_config.parse(config | {"layer_types": slides}, "a", "float32")
  assert {*listed.windows} == {4}
  mixed = ["full_attention", *slides[1:]]
  with pytest.raises(ValueError, match=r"a has layer_types .* in none"):
    hf_config.parse(config | {"layer_types": mixed}, "a", "float32")


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (
      dict(first_k_dense_replace=2**31 - 1),
      "= 2147483647; the model has 3 lay",
    ),
    (dict(first_k_dense_replace=-1), "= -1; the model has 3 layers"),
    (dict(v_head_dim=2**31 - 1), "at most 16,777,216 in all are accepted"),
    (dict(n_group=3), "routing by 3 groups is of experts that they divide"),
    (dict(topk_group=5), "topk_group = 5 of 4 groups"),
    (dict(num_experts_per_tok=5), "num_experts_per_tok = 5 of 2 groups of 2"),
    (dict(scoring_func="softmax"), "scoring_func = 'softmax'; accepted"),
    (
      dict(rope_parameters={"mscale_all_dim": 1e9}),
      "mscale_all_dim = 1000000000.0; it must be in 0..1000",
    ),
    (
      dict(rope_parameters={"rope_type": "linear"}),
      "mscale_all_dim = 1.5 with rope 'linear'; accepted: yarn",
    ),
  ],
)
def test_configs_of_deepseek_that_cannot_be_are_refused(changes, complaint):
  config = json.loads((PARITY / "deepseek_v3" / "config.json").read_text())
  rope = config["rope_parameters"] | changes.get("rope_parameters", {})
  config |= changes | {"rope_parameters": rope}
  with pytest.raises(ValueError, match=complaint) as error:
    hf_config.parse(config, "a", "float32")
  assert len(str(error.value)) < 400


def test_kimi_k2_s_rotations_have_a_step():
  """Its frequencies are kept or divided, and none lies between."""
  config = json.loads((PARITY / "deepseek_v3" / "config.json").read_text())
  config["rope_parameters"] |= {"beta_fast": 1.0, "beta_slow": 1.0}
  parsed = hf_config.parse(config, "a", "float32")
  scaling = parsed.rope_scaling
  assert scaling.beta_fast == scaling.beta_slow == 1.0
  again = hf_config.parse(hf_config.render(parsed), "a", "float32")
  assert again == parsed


@pytest.mark.parametrize(
  "changes, complaint",
  [
    ({"partial_rotary_factor": 0.25}, "rotary_factor = 0.25; accepted"),
    (
      {"mamba_n_groups": 3},
      r"mamba_n_heads = \d+ of the .* mamba_n_groups = 3",
    ),
    ({"mamba_d_head": 24}, "heads of 24 in its Mamba layers, which are"),
    ({"attn_layer_indices": [99]}, r"indices = \[99\]; each must be in 0\.\."),
  ],
)
def test_configs_of_bamba_that_cannot_be_are_refused(changes, complaint):
  config = json.loads((PARITY / "bamba" / "config.json").read_text())
  with pytest.raises(ValueError, match=complaint):
    hf_config.parse(config | changes, "a", "float32")
