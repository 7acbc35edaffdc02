"""Configs of published models, by name.

Invariant: a preset has exactly as many weights as the published model, except
Chinchilla, whose layers differ in kind. Imports no model code, so that the
roofline model can use presets.
"""

import dataclasses
import math
from typing import Any

from specdec.models.config import GEMMA, OLMO2, SIZES, TransformerConfig
from specdec.models.parts import (
  GATED_DELTA,
  GroupRouting,
  Latent,
  Recurrence,
)
from specdec.models.rope_scaling import RopeScaling, Yarn
from specdec.utils.spelling import choices


def _config(options: dict[str, Any], *sizes: int) -> TransformerConfig:
  """Builds a config; `sizes` are SIZES, options['windows'] is repeated."""
  windows = options.get("windows", ()) * sizes[0]
  fields = options | dict(zip(SIZES, sizes, strict=True))
  return TransformerConfig(**fields | {"windows": windows[: sizes[0]]})


_TIED = {"tied": True}
_LLAMA2 = {"vocab_size": 32_000}
_LLAMA3 = {"vocab_size": 128_256, "rope_theta": 500_000.0}
_LLAMA3_1 = _LLAMA3 | {"rope_scaling": RopeScaling("llama3", 8.0)}
_LLAMA3_2 = _LLAMA3 | _TIED | {"rope_scaling": RopeScaling("llama3", 32.0)}
# v0.3: no window, and 768 more tokens than v0.1.
_MISTRAL = {"vocab_size": 32_768, "rope_theta": 1e6}
_MIXTRAL = {
  "vocab_size": 32_000,
  "rope_theta": 1e6,
  "num_experts": 8,
  "experts_per_token": 2,
}
# Epsilon of the instruction-tuned Qwen 2.5; the base models from 14b on have
# 1e-5 in their config.json.
_QWEN = {"vocab_size": 151_936, "norm_epsilon": 1e-6, "rope_theta": 1e6}
_QWEN2 = _QWEN | _TIED | {"qkv_bias": True}
_QWEN2_LARGE = _QWEN | {"qkv_bias": True, "vocab_size": 152_064}
_QWEN3 = _QWEN | {"qk_norm": True}
_QWEN3_MOE = _QWEN3 | {"num_experts": 128, "experts_per_token": 8}
# Three layers with the gated delta rule, then one with attention.
_QWEN3_NEXT = _QWEN3 | {
  "rope_theta": 1e7,
  "rotary_dims": 64,
  "norm_offset": True,
  "attention_gate": True,
  "num_experts": 512,
  "experts_per_token": 10,
  "shared_width": 512,
  "shared_gate": True,
  "recurrence": Recurrence(
    GATED_DELTA,
    tuple(i for i in range(48) if i % 4 < 3),
    num_heads=32,
    num_key_heads=16,
    key_dim=128,
    value_dim=128,
  ),
}
_GPT_OSS = {
  "vocab_size": 201_088,
  "rope_theta": 150_000.0,
  "rope_scaling": Yarn(32.0, 4096, 1 + 0.1 * math.log(32), truncate=False),
  "windows": (128, None),
  "qkv_bias": True,
  "o_bias": True,
  "attention_sinks": True,
  "experts_per_token": 4,
  "expert_biases": True,
  "activation": "quick_gelu",
  "swiglu_limit": 7.0,
}
# Three layers that attend to chunks, then one to all, without rotation.
_LLAMA4 = {
  "vocab_size": 202_048,
  "rope_theta": 500_000.0,
  "rope_interleaved": True,
  "chunked": True,
  "windows": (8192, 8192, 8192, None),
  "unrotated_layers": tuple(range(3, 48, 4)),
  "experts_per_token": 1,
  "route_inputs": True,
  "shared_width": 8192,
  "unrotated_growth": 0.1,
}
_SCOUT = _LLAMA4 | {
  "num_experts": 16,
  "unit_qk_norm": True,
  "rope_scaling": RopeScaling("llama3", 16.0, 1.0, 1.0),
}
_MAVERICK = _LLAMA4 | {
  "num_experts": 128,
  "dense_layers": tuple(range(0, 48, 2)),
  "dense_width": 16_384,
}
# Without its MTP layer, which is a drafter.
_DEEPSEEK_V3 = {
  "vocab_size": 129_280,
  "norm_epsilon": 1e-6,
  "rope_scaling": Yarn(40.0, 4096, 1.0, score_growth=1.0),
  "rope_interleaved": True,
  "rotary_dims": 64,
  "latent": Latent(512, 128, 64, 128, query_rank=1536),
  "num_experts": 256,
  "experts_per_token": 8,
  "routing": GroupRouting(8, 4, 2.5),
  "dense_layers": (0, 1, 2),
  "dense_width": 18_432,
  "shared_width": 2048,
}
_GEMMA = GEMMA | _TIED | {"norm_epsilon": 1e-6, "query_scalar": 256}
_GEMMA2 = _GEMMA | {
  "vocab_size": 256_000,
  "windows": (4096, None),
  "attention_softcap": 50.0,
  "logit_softcap": 30.0,
}
_GEMMA3 = _GEMMA | {
  "vocab_size": 262_144,
  "windows": (*[512] * 5, None),
  "rope_theta": 1e6,
  "local_rope_theta": 1e4,
  "qk_norm": True,
}
# The multimodal sizes have a longer context and 64 more tokens.
_GEMMA3_LARGE = _GEMMA3 | {
  "vocab_size": 262_208,
  "windows": (*[1024] * 5, None),
  "rope_scaling": RopeScaling("linear", 8.0),
}
_SMOLLM2 = _TIED | {"vocab_size": 49_152, "rope_theta": 100_000.0}
_SMOLLM3 = _TIED | {
  "vocab_size": 128_256,
  "norm_epsilon": 1e-6,
  "rope_theta": 5e6,
  "unrotated_layers": tuple(range(3, 36, 4)),
}
_PHI3 = {"vocab_size": 32_064, "windows": (2047,), "fused": True}  # of 4k
_PHI4 = {"vocab_size": 100_352, "rope_theta": 250_000.0, "fused": True}
# Its longrope is left out: 96 divisors that change no cost.
_PHI4_MINI = _TIED | {
  "vocab_size": 200_064,
  "windows": (262_144,),
  "rotary_dims": 96,
  "fused": True,
}
_OLMO2 = OLMO2 | {
  "vocab_size": 100_352,
  "norm_epsilon": 1e-6,
  "rope_theta": 500_000.0,
}

# T5 1.1: heads of 64, a gated MLP, a head of its own.
_T5 = {
  "vocab_size": 32_128,
  "norm_epsilon": 1e-6,
  "query_scalar": 1.0,
  "activation": "gelu_tanh",
  "relative_buckets": 32,
}


def _t5(layers: int, width: int, mlp_width: int, heads: int):
  options = _T5 | {"encoder_layers": layers}
  return _config(options, layers, width, mlp_width, heads, heads, 64)


# Without LaMDA.
_PRESETS = {
  "llama2-7b": _config(_LLAMA2, 32, 4096, 11008, 32, 32, 128),
  "llama2-13b": _config(_LLAMA2, 40, 5120, 13824, 40, 40, 128),
  "llama2-70b": _config(_LLAMA2, 80, 8192, 28672, 64, 8, 128),
  "llama3-1b": _config(_LLAMA3_2, 16, 2048, 8192, 32, 8, 64),
  "llama3-3b": _config(_LLAMA3_2, 28, 3072, 8192, 24, 8, 128),
  "llama3-8b": _config(_LLAMA3_1, 32, 4096, 14336, 32, 8, 128),
  "llama3-70b": _config(_LLAMA3_1, 80, 8192, 28672, 64, 8, 128),
  "llama3-405b": _config(_LLAMA3_1, 126, 16384, 53248, 128, 8, 128),
  "mistral-7b": _config(_MISTRAL, 32, 4096, 14336, 32, 8, 128),
  "mixtral-8x7b": _config(_MIXTRAL, 32, 4096, 14336, 32, 8, 128),
  "qwen2.5-0.5b": _config(_QWEN2, 24, 896, 4864, 14, 2, 64),
  "qwen2.5-1.5b": _config(_QWEN2, 28, 1536, 8960, 12, 2, 128),
  "qwen2.5-3b": _config(_QWEN2, 36, 2048, 11008, 16, 2, 128),
  "qwen2.5-7b": _config(_QWEN2_LARGE, 28, 3584, 18944, 28, 4, 128),
  "qwen2.5-14b": _config(_QWEN2_LARGE, 48, 5120, 13824, 40, 8, 128),
  "qwen2.5-32b": _config(_QWEN2_LARGE, 64, 5120, 27648, 40, 8, 128),
  "qwen2.5-72b": _config(_QWEN2_LARGE, 80, 8192, 29568, 64, 8, 128),
  "qwen3-0.6b": _config(_QWEN3 | _TIED, 28, 1024, 3072, 16, 8, 128),
  "qwen3-1.7b": _config(_QWEN3 | _TIED, 28, 2048, 6144, 16, 8, 128),
  "qwen3-4b": _config(_QWEN3 | _TIED, 36, 2560, 9728, 32, 8, 128),
  "qwen3-8b": _config(_QWEN3, 36, 4096, 12288, 32, 8, 128),
  "qwen3-14b": _config(_QWEN3, 40, 5120, 17408, 40, 8, 128),
  "qwen3-32b": _config(_QWEN3, 64, 5120, 25600, 64, 8, 128),
  "qwen3-30b-a3b": _config(_QWEN3_MOE, 48, 2048, 768, 32, 4, 128),
  "qwen3-next-80b-a3b": _config(_QWEN3_NEXT, 48, 2048, 512, 16, 2, 256),
  "llama4-scout": _config(_SCOUT, 48, 5120, 8192, 40, 8, 128),
  "llama4-maverick": _config(_MAVERICK, 48, 5120, 8192, 40, 8, 128),
  "deepseek-v3": _config(_DEEPSEEK_V3, 61, 7168, 2048, 128, 1, 192),
  "gpt-oss-20b": _config(
    _GPT_OSS | {"num_experts": 32}, 24, 2880, 2880, 64, 8, 64
  ),
  "gpt-oss-120b": _config(
    _GPT_OSS | {"num_experts": 128}, 36, 2880, 2880, 64, 8, 64
  ),
  "gemma2-2b": _config(_GEMMA2, 26, 2304, 9216, 8, 4, 256),
  "gemma2-9b": _config(_GEMMA2, 42, 3584, 14336, 16, 8, 256),
  "gemma2-27b": _config(  # query_scalar = width / num_heads
    _GEMMA2 | {"query_scalar": 144}, 46, 4608, 36864, 32, 16, 128
  ),
  "gemma3-270m": _config(_GEMMA3, 18, 640, 2048, 4, 1, 256),
  "gemma3-1b": _config(_GEMMA3, 26, 1152, 6912, 4, 1, 256),
  "gemma3-4b": _config(_GEMMA3_LARGE, 34, 2560, 10240, 8, 4, 256),
  "gemma3-12b": _config(_GEMMA3_LARGE, 48, 3840, 15360, 16, 8, 256),
  "gemma3-27b": _config(
    _GEMMA3_LARGE | {"query_scalar": 168}, 62, 5376, 21504, 32, 16, 128
  ),
  "smollm2-135m": _config(_SMOLLM2, 30, 576, 1536, 9, 3, 64),
  "smollm2-360m": _config(_SMOLLM2, 32, 960, 2560, 15, 5, 64),
  "smollm2-1.7b": _config(
    _SMOLLM2 | {"rope_theta": 130_000.0}, 24, 2048, 8192, 32, 32, 64
  ),
  "smollm3-3b": _config(_SMOLLM3, 36, 2048, 11008, 16, 4, 128),
  "phi3-mini": _config(_PHI3, 32, 3072, 8192, 32, 32, 96),
  "phi3-medium": _config(_PHI3, 40, 5120, 17920, 40, 10, 128),
  "phi4-mini": _config(_PHI4_MINI, 32, 3072, 8192, 24, 8, 128),
  "phi4": _config(_PHI4, 40, 5120, 17920, 40, 10, 128),
  "olmo2-1b": _config(_OLMO2, 16, 2048, 8192, 16, 16, 128),
  "olmo2-7b": _config(_OLMO2, 32, 4096, 11008, 32, 32, 128),
  "olmo2-13b": _config(_OLMO2, 40, 5120, 13824, 40, 40, 128),
  "olmo2-32b": _config(_OLMO2, 64, 5120, 27648, 40, 8, 128),
  "t5-small": _t5(8, 512, 1024, 6),
  "t5-base": _t5(12, 768, 2048, 12),
  "t5-large": _t5(24, 1024, 2816, 16),
  "t5-xl": _t5(24, 2048, 5120, 32),
  "t5-xxl": _t5(24, 4096, 10_240, 64),
  # The pair of arXiv:2302.01318. Its MLPs are ungated, 4 x width wide;
  # a gated MLP with as many weights has 8 / 3 x width, rounded to a multiple
  # of 16. Their relative position matrices (width^2 in each layer, the rest of
  # the 70 billion) have no counterpart here.
  "chinchilla-4b": _config(_LLAMA2 | _TIED, 8, 6144, 16384, 48, 48, 128),
  "chinchilla-70b": _config(_LLAMA2 | _TIED, 80, 8192, 21840, 64, 64, 128),
}


def names() -> list[str]:
  """Lists the valid arguments of `get`, by family and size."""
  return list(_PRESETS)


def get(name: str, dtype: str = "float32") -> TransformerConfig:
  """Returns the config of a model; raises ValueError if it is unknown."""
  if name not in _PRESETS:
    raise ValueError(f"preset {name!r} is unknown; {choices(name, names())}")
  return dataclasses.replace(_PRESETS[name], dtype=dtype)
