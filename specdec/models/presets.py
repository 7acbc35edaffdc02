"""Configs of published decoders, by name.

Invariant: a preset has exactly as many weights as the published decoder, except
Chinchilla, whose layers differ in kind. Imports no model code, so that the
roofline model can use presets.
"""

import dataclasses

from specdec.models.config import RopeScaling, TransformerConfig
from specdec.utils.spelling import choices

_NUMBERS = (
  "num_layers",
  "width",
  "mlp_width",
  "num_heads",
  "num_kv_heads",
  "head_dim",
)


def _like(
  shapes: dict[str, tuple[int, ...]],
  window: int | None = None,
  full_every: int = 1,
  **options,
) -> dict[str, TransformerConfig]:
  """Builds configs that differ only in the fields of _NUMBERS.

  Args:
    shapes: preset name -> values of _NUMBERS.
    window: sliding window of all layers except every `full_every`-th.
    full_every: ignored without a window.
    **options: other fields of TransformerConfig.
  """
  configs = {}
  for name, numbers in shapes.items():
    layers = range(1, numbers[0] + 1) if window else ()
    configs[name] = TransformerConfig(
      **dict(zip(_NUMBERS, numbers)),
      windows=tuple(window if i % full_every else None for i in layers),
      **options,
    )
  return configs


def _llama3(shapes, factor: float, **options):
  return _like(
    shapes,
    vocab_size=128_256,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor),
    **options,
  )


def _qwen(shapes, **options):
  # Epsilon of the instruction-tuned Qwen 2.5; the base models from 14b on have
  # 1e-5 in their config.json.
  return _like(shapes, norm_epsilon=1e-6, rope_theta=1e6, **options)


def _gemma(shapes, **options):
  return _like(
    shapes,
    norm_epsilon=1e-6,
    tied=True,
    post_norms=True,
    norm_offset=True,
    scale_embedding=True,
    activation="gelu_tanh",
    **options,
  )


def _gemma2(shapes, query_scalar: float):
  return _gemma(
    shapes,
    window=4096,
    full_every=2,
    vocab_size=256_000,
    query_scalar=query_scalar,
    attention_softcap=50.0,
    logit_softcap=30.0,
  )


def _gemma3(shapes, query_scalar: float = 256, **options):
  return _gemma(
    shapes,
    full_every=6,
    rope_theta=1e6,
    local_rope_theta=1e4,
    qk_norm=True,
    query_scalar=query_scalar,
    **options,
  )


# The multimodal sizes have a longer context and 64 more tokens.
_GEMMA3_LARGE = {
  "window": 1024,
  "vocab_size": 262_208,
  "rope_scaling": RopeScaling("linear", 8.0),
}


# Without T5, LaMDA and DeepSeek: encoder-decoders and MLA are not implemented.
_PRESETS = (
  _like(
    {
      "llama2-7b": (32, 4096, 11008, 32, 32, 128),
      "llama2-13b": (40, 5120, 13824, 40, 40, 128),
      "llama2-70b": (80, 8192, 28672, 64, 8, 128),
    },
    vocab_size=32_000,
  )
  | _llama3(  # 3.2
    {
      "llama3-1b": (16, 2048, 8192, 32, 8, 64),
      "llama3-3b": (28, 3072, 8192, 24, 8, 128),
    },
    factor=32.0,
    tied=True,
  )
  | _llama3(  # 3.1
    {
      "llama3-8b": (32, 4096, 14336, 32, 8, 128),
      "llama3-70b": (80, 8192, 28672, 64, 8, 128),
      "llama3-405b": (126, 16384, 53248, 128, 8, 128),
    },
    factor=8.0,
  )
  | _like(  # v0.3: no window, and 768 more tokens than v0.1
    {"mistral-7b": (32, 4096, 14336, 32, 8, 128)},
    vocab_size=32_768,
    rope_theta=1e6,
  )
  | _like(
    {"mixtral-8x7b": (32, 4096, 14336, 32, 8, 128)},
    vocab_size=32_000,
    rope_theta=1e6,
    num_experts=8,
    experts_per_token=2,
  )
  | _qwen(
    {
      "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 64),
      "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 128),
      "qwen2.5-3b": (36, 2048, 11008, 16, 2, 128),
    },
    vocab_size=151_936,
    qkv_bias=True,
    tied=True,
  )
  | _qwen(
    {
      "qwen2.5-7b": (28, 3584, 18944, 28, 4, 128),
      "qwen2.5-14b": (48, 5120, 13824, 40, 8, 128),
      "qwen2.5-32b": (64, 5120, 27648, 40, 8, 128),
      "qwen2.5-72b": (80, 8192, 29568, 64, 8, 128),
    },
    vocab_size=152_064,
    qkv_bias=True,
  )
  | _qwen(
    {
      "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128),
      "qwen3-1.7b": (28, 2048, 6144, 16, 8, 128),
      "qwen3-4b": (36, 2560, 9728, 32, 8, 128),
    },
    vocab_size=151_936,
    qk_norm=True,
    tied=True,
  )
  | _qwen(
    {
      "qwen3-8b": (36, 4096, 12288, 32, 8, 128),
      "qwen3-14b": (40, 5120, 17408, 40, 8, 128),
      "qwen3-32b": (64, 5120, 25600, 64, 8, 128),
    },
    vocab_size=151_936,
    qk_norm=True,
  )
  | _qwen(
    {"qwen3-30b-a3b": (48, 2048, 768, 32, 4, 128)},
    vocab_size=151_936,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
  )
  | _gemma2(
    {
      "gemma2-2b": (26, 2304, 9216, 8, 4, 256),
      "gemma2-9b": (42, 3584, 14336, 16, 8, 256),
    },
    query_scalar=256,
  )
  | _gemma2(
    {"gemma2-27b": (46, 4608, 36864, 32, 16, 128)},
    query_scalar=144,  # width / num_heads
  )
  | _gemma3(
    {
      "gemma3-270m": (18, 640, 2048, 4, 1, 256),
      "gemma3-1b": (26, 1152, 6912, 4, 1, 256),
    },
    window=512,
    vocab_size=262_144,
  )
  | _gemma3(
    {
      "gemma3-4b": (34, 2560, 10240, 8, 4, 256),
      "gemma3-12b": (48, 3840, 15360, 16, 8, 256),
    },
    **_GEMMA3_LARGE,
  )
  | _gemma3(
    {"gemma3-27b": (62, 5376, 21504, 32, 16, 128)},
    query_scalar=168,  # width / num_heads
    **_GEMMA3_LARGE,
  )
  | _like(
    {
      "smollm2-135m": (30, 576, 1536, 9, 3, 64),
      "smollm2-360m": (32, 960, 2560, 15, 5, 64),
    },
    vocab_size=49_152,
    rope_theta=100_000.0,
    tied=True,
  )
  | _like(
    {"smollm2-1.7b": (24, 2048, 8192, 32, 32, 64)},
    vocab_size=49_152,
    rope_theta=130_000.0,
    tied=True,
  )
  # The pair of arXiv:2302.01318. Its MLPs are ungated, 4 x width wide;
  # a gated MLP with as many weights has 8 / 3 x width, rounded to a multiple
  # of 16. Their relative position matrices (width^2 in each layer, the rest of
  # the 70 billion) have no counterpart here.
  | _like(
    {
      "chinchilla-4b": (8, 6144, 16384, 48, 48, 128),
      "chinchilla-70b": (80, 8192, 21840, 64, 64, 128),
    },
    vocab_size=32_000,
    tied=True,
  )
)


def names() -> list[str]:
  """Lists the valid arguments of `get`, by family and size."""
  return list(_PRESETS)


def get(name: str, dtype: str = "float32") -> TransformerConfig:
  """Returns the config of a published decoder.

  Args:
    name: one of `names()`.
    dtype: 'float32' or 'bfloat16'.

  Raises:
    ValueError: there is no such preset.
  """
  if name not in _PRESETS:
    raise ValueError(f"preset {name!r} is unknown; {choices(name, names())}")
  return dataclasses.replace(_PRESETS[name], dtype=dtype)
