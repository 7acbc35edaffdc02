"""config.json of Hugging Face to TransformerConfig and back.

Invariant: every option that changes a model's law is either carried over or
refused by name; nothing is dropped in silence.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.names import listed
from specdec.models.config import RopeScaling, TransformerConfig

# Architectures whose law the decoder implements. The value says whether
# `sliding_window` in their config is in force.
ARCHITECTURES = {"LlamaForCausalLM": False, "MistralForCausalLM": True}

# What a missing key means; for most keys it means Llama's default.
_WHEN_ABSENT = {
  "MistralForCausalLM": {"sliding_window": 4096, "num_key_value_heads": 8}
}

# Option -> values that leave the law as implemented; absent is as good as the
# first of them.
_ONLY = {
  "attention_bias": (False, None),
  "mlp_bias": (False, None),
  "hidden_act": ("silu",),
  "partial_rotary_factor": (1.0, 1, None),
  "quantization_config": (None,),
}

# Rope kind -> field of RopeScaling for each of the numbers it must bring.
_ROPE_FIELDS = {
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
  },
}


def parse(config: Mapping[str, Any], source: str, dtype: str):
  """TransformerConfig of a decoded config.json.

  Args:
    config: what config.json says.
    source: said in errors.
    dtype: 'float32' or 'bfloat16', that the weights will be loaded in.

  Raises:
    ValueError: the architecture or an option is not implemented, or a size is
      missing.
  """
  names = config.get("architectures") or []
  architecture = names[0] if len(names) == 1 else None
  if architecture not in ARCHITECTURES:
    raise ValueError(
      f"{source} is of architecture {listed(names) or 'unknown'}; accepted: "
      f"{', '.join(ARCHITECTURES)}"
    )
  for option, accepted in _ONLY.items():
    value = config.get(option, accepted[0])
    if value not in accepted:
      raise ValueError(
        f"{source} has {option} = {value!r}; accepted: {accepted[0]!r}"
      )

  def number(key: str, default: Any = None) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
      raise ValueError(f"{source} has {key} = {value!r}; it must be a number")
    return value

  config = _WHEN_ABSENT.get(architecture, {}) | dict(config)
  layers, heads = number("num_hidden_layers"), number("num_attention_heads")
  width = number("hidden_size")
  theta, scaling = _rope(config, source)
  window = config.get("sliding_window") if ARCHITECTURES[architecture] else None
  return TransformerConfig(
    vocab_size=number("vocab_size"),
    num_layers=layers,
    width=width,
    mlp_width=number("intermediate_size"),
    num_heads=heads,
    num_kv_heads=number("num_key_value_heads", heads),
    head_dim=number("head_dim", width // max(heads, 1)),
    norm_epsilon=number("rms_norm_eps", 1e-6),
    rope_theta=float(theta),
    rope_scaling=scaling,
    tied=bool(config.get("tie_word_embeddings", False)),
    windows=() if window is None else (window,) * layers,
    dtype=dtype,
  )


def _rope(
  config: Mapping[str, Any], source: str
) -> tuple[float, RopeScaling | None]:
  # Transformers 5 gathers base and scaling in rope_parameters; before, the base
  # stood on its own and rope_scaling held the rest.
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind not in _ROPE_FIELDS:
    raise ValueError(
      f"{source} scales its rotary frequencies by {kind!r}; accepted: default, "
      f"{', '.join(_ROPE_FIELDS)}"
    )
  fields = _ROPE_FIELDS[kind]
  missing = [key for key in fields if key not in rope]
  if missing:
    raise ValueError(f"{source} lacks {listed(missing)} of rope {kind!r}")
  numbers = {ours: rope[theirs] for theirs, ours in fields.items()}
  return theta, RopeScaling(kind, **numbers)


def render(config: TransformerConfig) -> dict[str, Any]:
  """A config.json that `parse` reads back as `config`.

  Raises:
    ValueError: layers have different windows, which these architectures do not.
  """
  windows = set(config.windows or (None,))
  if len(windows) > 1:
    raise ValueError(
      f"windows = {config.windows}; Llama and Mistral have one for all layers"
    )
  window = windows.pop()
  rendered = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": config.vocab_size,
    "num_hidden_layers": config.num_layers,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_epsilon,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.tied,
    "torch_dtype": config.dtype,
  }
  if window is not None:
    rendered |= {
      "architectures": ["MistralForCausalLM"],
      "model_type": "mistral",
      "sliding_window": window,
    }
  scaling = config.rope_scaling
  if scaling is not None:
    rendered["rope_scaling"] = {"rope_type": scaling.kind} | {
      theirs: getattr(scaling, ours)
      for theirs, ours in _ROPE_FIELDS[scaling.kind].items()
    }
  return rendered
