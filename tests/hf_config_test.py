"""Config files: defaults of each architecture, options, refusals."""

import dataclasses
import functools

import pytest

from specdec.checkpoints import hf_config, t5_config
from specdec.models.config import RopeScaling, TransformerConfig

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
  ],
)  # fmt: skip
def test_absent_keys_have_the_defaults_of_transformers(architecture, fields):
  config = parse(f"{architecture}ForCausalLM")
  defaults = {"rope_theta": 1e4, "norm_epsilon": 1e-6, "windows": ()}
  for name, value in (defaults | {"tied": False} | fields).items():
    assert getattr(config, name) == value, name


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


LOCAL = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
  "architecture, changes, sentence",
  [
    ("Phi", {}, "PhiForCausalLM; accepted: Llama"),
    ("Llama", {"architectures": None}, "architecture unknown; accepted"),
    ("Qwen3", {"attention_bias": True}, "attention_bias = True; accepted"),
    ("Llama", {"mlp_bias": True}, "json has mlp_bias = True; accepted"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; accepted: 'silu'"),
    ("Llama", {"rope_scaling": {"type": "yarn"}}, "'yarn'; accepted: default"),
    ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
     "lacks low_freq"),
    ("Llama", {"quantization_config": {"bits": 4}}, "quantization_config = "),
    ("Llama", {"hidden_size": None}, "hidden_size = None; it must be an integ"),
    ("Llama", {"num_key_value_heads": 3}, "num_heads = 32 is not a multiple"),
    ("Qwen3", {"layer_types": ["full_attention"]}, "or full_attention for"),
    ("Qwen2", {"layer_types": ["chunked_attention"] * 8}, "layer_types = "),
    ("Qwen2", {"layer_types": ["sliding_attention"] * 8}, "no sliding_window"),
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
    ("Qwen3Moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\];"),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2;"),
    ("Mixtral", {"num_local_experts": 1}, "num_experts = 1; it must be"),
    ("Gemma3", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar = None"),
    ("Llama", {"num_hidden_layers": 10**9}, "num_layers = 1,000,000,000; at"),
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
    hf_config.render(changed(windows=(None, 4) * 4))
  with pytest.raises(ValueError, match=r"Qwen2.* differs in qk_norm"):
    hf_config.render(changed(qkv_bias=True, qk_norm=True))
  rendered = hf_config.render(changed(windows=(None,) * 8))
  assert rendered["architectures"] == ["LlamaForCausalLM"]
