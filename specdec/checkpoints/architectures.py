"""Table of the supported Hugging Face architectures.

To support another, add a row to ARCHITECTURES and, where the model needs them,
options of TransformerConfig, parameters in models/params.py and rows in
names.py.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specdec.models.config import GEMMA, OLMO2
from specdec.models.parts import GATED_DELTA, MAMBA2

# Field of TransformerConfig -> key of config.json.
KEYS = {
  "vocab_size": "vocab_size",
  "num_layers": "num_hidden_layers",
  "width": "hidden_size",
  "mlp_width": "intermediate_size",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "norm_epsilon": "rms_norm_eps",
  "tied": "tie_word_embeddings",
  "mask_token": "pard_token",
}
# Key -> values under which the implementation is exact; a missing key means the
# first of them.
ONLY = {
  "attention_bias": (False, None),
  "mlp_bias": (False, None),
  "quantization_config": (None,),
}
_SILU = {"hidden_act": ("silu",)}
_GELU = {
  "hidden_activation": ("gelu_pytorch_tanh",),
  "use_bidirectional_attention": (False, None),
}
# Meaning of missing keys, unless an architecture overrides it.
LLAMA_ABSENT = {
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "sliding_window": None,
}


# Whether a layer has a sliding window, in configs without layer_types.
def _all(config: Mapping[str, Any], _: int) -> bool:
  return config["sliding_window"] is not None


def _late(config: Mapping[str, Any], layer: int) -> bool:
  return _all(config, layer) and layer >= config["max_window_layers"]


def _without_rotation(config: Mapping[str, Any], layer: int) -> bool:
  return _all(config, layer) and not config["no_rope_layers"][layer]


def _all_but_every(config: Mapping[str, Any], layer: int) -> bool:
  return (layer + 1) % config["sliding_window_pattern"] != 0


class Architecture(NamedTuple):
  """What an architecture implies in addition to its config.json."""

  model_type: str
  sliding: Callable[[Mapping[str, Any], int], bool]  # (config, layer)
  implied: Mapping[str, Any] = {}  # fields of TransformerConfig
  keys: Mapping[str, str] = {}  # in addition to KEYS
  absent: Mapping[str, Any] = {}  # overrides LLAMA_ABSENT
  only: Mapping[str, tuple] = _SILU  # in addition to ONLY
  recurrence: str | None = None  # kind of its recurrent layers
  # Files hold several matrices as one (stored_names.py).
  fuses: bool = False

  @property
  def is_phi(self) -> bool:
    """Whether its rotary embeddings have the options of Phi-3's."""
    return self.model_type == "phi3"

  @property
  def has_chunks(self) -> bool:
    """Whether its windows are chunks, and some of its layers dense."""
    return self.model_type == "llama4_text"

  @property
  def has_latent(self) -> bool:
    """Whether its attention is latent, and its experts are routed by groups."""
    return self.model_type == "deepseek_v3"

  @property
  def layer_types(self) -> bool:
    """Whether config.json may list the kind of each layer in layer_types."""
    return self.sliding in (_late, _without_rotation, _all_but_every)


_QWEN = {
  "num_key_value_heads": 32,
  "sliding_window": 4096,
  "use_sliding_window": False,
  "max_window_layers": 28,
}
_GEMMA_KEYS = {
  "query_scalar": "query_pre_attn_scalar",
  "logit_softcap": "final_logit_softcapping",
}
_GEMMA_ABSENT = {
  "num_key_value_heads": 4,
  "head_dim": 256,
  "query_pre_attn_scalar": 256,
  "tie_word_embeddings": True,
  "sliding_window": 4096,
}
_EXPERTS = {"experts_per_token": "num_experts_per_tok"}
_QWEN_EXPERTS = _EXPERTS | {
  "num_experts": "num_experts",
  "normalize_experts": "norm_topk_prob",
  "mlp_width": "moe_intermediate_size",
}
_ALL_SPARSE = {"mlp_only_layers": ([], None), "decoder_sparse_step": (1,)}

# Architectures that also see images -> that of their text_config, and the
# keys that may be missing in it.
WITH_IMAGES: dict[str, tuple[str, dict[str, int | bool]]] = {
  "Gemma3ForConditionalGeneration": (
    "Gemma3ForCausalLM",
    {
      "vocab_size": 262_208,
      "hidden_size": 2304,
      "intermediate_size": 9216,
      "num_hidden_layers": 26,
      "num_attention_heads": 8,
      "tie_word_embeddings": True,
    },
  ),
  "Llama4ForConditionalGeneration": (
    "Llama4ForCausalLM",
    {"tie_word_embeddings": False},
  ),
}
ARCHITECTURES = {
  "LlamaForCausalLM": Architecture("llama", lambda *_: False),
  "MistralForCausalLM": Architecture(
    "mistral", _all, absent={"sliding_window": 4096, "num_key_value_heads": 8}
  ),
  "Qwen2ForCausalLM": Architecture(
    "qwen2", _late, implied={"qkv_bias": True}, absent=_QWEN
  ),
  "MiMoForCausalLM": Architecture(  # Qwen 2 with MTP layers
    "mimo",
    _late,
    implied={"qkv_bias": True},
    absent=_QWEN,
    only=_SILU | {"attention_bias": (True, None)},
  ),
  "Qwen3ForCausalLM": Architecture(
    "qwen3", _late, implied={"qk_norm": True}, absent=_QWEN | {"head_dim": 128}
  ),
  "Phi3ForCausalLM": Architecture(
    "phi3",
    _all,
    implied={"fused": True},
    fuses=True,
    absent={
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 4096,
      "original_max_position_embeddings": 4096,
    },
  ),
  "Olmo2ForCausalLM": Architecture(
    "olmo2",
    lambda *_: False,
    implied=OLMO2,
    absent={"rms_norm_eps": 1e-5},
  ),
  "SmolLM3ForCausalLM": Architecture(
    "smollm3",
    _without_rotation,
    absent={
      "num_key_value_heads": 4,
      "rope_theta": 2e6,
      "tie_word_embeddings": True,
      "use_sliding_window": False,
      "no_rope_layers": None,
      "no_rope_layer_interval": 4,
    },
  ),
  "Gemma2ForCausalLM": Architecture(
    "gemma2",
    _all_but_every,
    implied=GEMMA,
    keys=_GEMMA_KEYS | {"attention_softcap": "attn_logit_softcapping"},
    absent=_GEMMA_ABSENT
    | {
      "attn_logit_softcapping": 50.0,
      "final_logit_softcapping": 30.0,
      "sliding_window_pattern": 2,
    },
    only=_GELU | {"sliding_window_pattern": (2,)},
  ),
  "Gemma3ForCausalLM": Architecture(
    "gemma3_text",
    _all_but_every,
    implied=GEMMA | {"qk_norm": True},
    keys=_GEMMA_KEYS,
    absent=_GEMMA_ABSENT
    | {
      "rope_theta": 1e6,
      "rope_local_base_freq": 1e4,
      "sliding_window_pattern": 6,
    },
    only=_GELU | {"attn_logit_softcapping": (None,)},
  ),
  "MixtralForCausalLM": Architecture(
    "mixtral",
    _all,
    keys=_EXPERTS | {"num_experts": "num_local_experts"},
    absent={
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-5,
      "rope_theta": 1e6,
      "num_local_experts": 8,
      "num_experts_per_tok": 2,
    },
  ),
  "Qwen3MoeForCausalLM": Architecture(
    "qwen3_moe",
    _all,
    implied={"qk_norm": True},
    keys=_QWEN_EXPERTS,
    absent=_QWEN
    | {
      "num_key_value_heads": 4,
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "norm_topk_prob": False,
      "moe_intermediate_size": 768,
    },
    only=_SILU | _ALL_SPARSE,
  ),
  "GptOssForCausalLM": Architecture(
    "gpt_oss",
    _all_but_every,
    implied={
      "qkv_bias": True,
      "o_bias": True,
      "attention_sinks": True,
      "expert_biases": True,
      "activation": "quick_gelu",
    },
    keys=_EXPERTS
    | {"num_experts": "num_local_experts", "swiglu_limit": "swiglu_limit"},
    absent={
      "num_key_value_heads": 8,
      "head_dim": 64,
      "rms_norm_eps": 1e-5,
      "rope_theta": 150_000.0,
      "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
      },
      "sliding_window": 128,
      "sliding_window_pattern": 2,
      "num_local_experts": 128,
      "num_experts_per_tok": 4,
      "swiglu_limit": 7.0,
    },
    only=_SILU
    | {
      "attention_bias": (True,),
      "swiglu_alpha": (1.702,),
      "sliding_window_pattern": (2,),
    },
    fuses=True,
  ),
  "Llama4ForCausalLM": Architecture(
    "llama4_text",
    lambda config, layer: bool(config["no_rope_layers"][layer]),
    implied={"rope_interleaved": True, "route_inputs": True, "chunked": True},
    keys=_EXPERTS
    | {
      "num_experts": "num_local_experts",
      "shared_width": "intermediate_size",
      "unit_qk_norm": "use_qk_norm",
      "unrotated_floor": "floor_scale",
    },
    absent={
      "num_key_value_heads": 8,
      "head_dim": 128,
      "rms_norm_eps": 1e-5,
      "rope_theta": 500_000.0,
      "sliding_window": None,
      "attention_chunk_size": 8192,
      "no_rope_layers": None,
      "no_rope_layer_interval": 4,
      "num_local_experts": 16,
      "num_experts_per_tok": 1,
      "moe_layers": None,
      "interleave_moe_layer_step": 1,
      "intermediate_size_mlp": 16384,
      "use_qk_norm": True,
      "attn_temperature_tuning": True,
      "attn_scale": 0.1,
      "floor_scale": 8192,
    },
    fuses=True,
  ),
  "DeepseekV3ForCausalLM": Architecture(
    "deepseek_v3",
    lambda *_: False,
    keys=_QWEN_EXPERTS
    | {
      "num_experts": "n_routed_experts",
      "rope_interleaved": "rope_interleave",
    },
    absent={
      "n_routed_experts": 256,
      "num_experts_per_tok": 8,
      "norm_topk_prob": True,
      "moe_intermediate_size": 2048,
      "n_shared_experts": 1,
      "first_k_dense_replace": 3,
      "rope_interleave": True,
      "kv_lora_rank": 512,
      "q_lora_rank": 1536,
      "qk_nope_head_dim": 128,
      "qk_rope_head_dim": 64,
      "v_head_dim": 128,
      "n_group": 8,
      "topk_group": 4,
      "routed_scaling_factor": 2.5,
    },
    only=_SILU
    | {
      "scoring_func": ("sigmoid",),
      "topk_method": ("noaux_tc",),
      "moe_layer_freq": (1,),
    },
    fuses=True,
  ),
  "Qwen3NextForCausalLM": Architecture(
    "qwen3_next",
    lambda *_: False,
    implied={
      "qk_norm": True,
      "norm_offset": True,
      "attention_gate": True,
      "shared_gate": True,
    },
    keys=_QWEN_EXPERTS | {"shared_width": "shared_expert_intermediate_size"},
    absent={
      "num_key_value_heads": 2,
      "head_dim": 256,
      "partial_rotary_factor": 0.25,
      "num_experts": 512,
      "num_experts_per_tok": 10,
      "norm_topk_prob": True,
      "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512,
      "full_attention_interval": 4,
      "linear_num_value_heads": 32,
      "linear_num_key_heads": 16,
      "linear_key_head_dim": 128,
      "linear_value_head_dim": 128,
      "linear_conv_kernel_dim": 4,
    },
    only=_SILU | _ALL_SPARSE,
    recurrence=GATED_DELTA,
    fuses=True,
  ),
  "BambaForCausalLM": Architecture(
    "bamba",
    lambda *_: False,
    absent={
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-5,
      "partial_rotary_factor": 0.5,
      "attn_layer_indices": None,
      "mamba_n_heads": 128,
      "mamba_n_groups": 1,
      "mamba_d_state": 256,
      "mamba_d_head": "auto",
      "mamba_d_conv": 4,
      "mamba_expand": 2,
      "mamba_conv_bias": True,
    },
    only=_SILU
    | {
      "partial_rotary_factor": (0.5,),  # transformers takes no other from here
      "mamba_proj_bias": (False, None),
      "time_step_limit": (
        None,
        [0.0, math.inf],
        [0.0, {"__float__": "Infinity"}],
      ),
    },
    recurrence=MAMBA2,
    fuses=True,
  ),
}
