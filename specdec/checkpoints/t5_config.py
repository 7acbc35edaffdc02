"""Converts config.json of T5 (1.0, 1.1, Flan, ...) and mT5, and back.

Invariant: as of hf_config, every option that affects the distribution is either
converted or rejected by name.
"""

from collections.abc import Mapping
from typing import Any

from specdec.models.config import TransformerConfig, check_limits
from specdec.utils.spelling import naming

ARCHITECTURES = {
  "T5ForConditionalGeneration": "t5",
  "MT5ForConditionalGeneration": "mt5",
  "T5WithLMHeadModel": "t5",  # as transformers named it before version 3
}
# feed_forward_proj -> (activation, gated).
_MLPS = {
  "relu": ("relu", False),
  "gated-gelu": ("gelu_tanh", True),
  "gated-silu": ("silu", True),
}
# Field of TransformerConfig -> key of config.json.
_KEYS = {
  "vocab_size": "vocab_size",
  "width": "d_model",
  "head_dim": "d_kv",
  "mlp_width": "d_ff",
  "encoder_layers": "num_layers",
  "num_layers": "num_decoder_layers",
  "num_heads": "num_heads",
  "relative_buckets": "relative_attention_num_buckets",
  "relative_distance": "relative_attention_max_distance",
  "start_token": "decoder_start_token_id",
}
# Key -> its default in transformers.
_ABSENT = {
  "d_kv": 64,
  "relative_attention_num_buckets": 32,
  "relative_attention_max_distance": 128,
  "decoder_start_token_id": 0,
}


def parse(
  config: Mapping[str, Any], source: str, dtype: str, has_head: bool | None
) -> TransformerConfig:
  """Converts a decoded config.json, to load the weights in `dtype`.

  Args:
    has_head: whether the files hold a vocabulary projection; None: unknown.

  Raises ValueError, beginning with `source`, where an option is not
  implemented, or a size is missing.
  """
  config = dict(config)
  if config.get("num_decoder_layers") is None:
    config["num_decoder_layers"] = config.get("num_layers")
  sizes = {}
  for field, key in _KEYS.items():
    value = config.get(key)
    value = _ABSENT.get(key) if value is None else value
    if type(value) is not int or not 0 <= value < 2**31:
      raise ValueError(
        f"{source} has {key} = {value!r:.60}; it must be an integer in "
        "0..2**31-1"
      )
    sizes[field] = value
  names = config["architectures"]  # a list of one, or its member alone
  name = names if isinstance(names, str) else names[0]
  mt5 = ARCHITECTURES[name] == "mt5"
  mlp = config.get("feed_forward_proj", "gated-gelu" if mt5 else "relu")
  if mlp not in tuple(_MLPS):
    raise ValueError(
      f"{source} has feed_forward_proj = {mlp!r:.60}; accepted: "
      f"{', '.join(_MLPS)}"
    )
  epsilon = config.get("layer_norm_epsilon", 1e-6)
  if type(epsilon) not in (int, float):
    raise ValueError(
      f"{source} has layer_norm_epsilon = {epsilon!r:.60}; it must be a number"
    )
  flags = {"tie_word_embeddings": True, "scale_decoder_outputs": None}
  for key, default in flags.items():
    flags[key] = default if config.get(key) is None else config[key]
    if flags[key] not in (True, False, None):
      raise ValueError(
        f"{source} has {key} = {flags[key]!r:.60}; it must be true or false"
      )
  tied, scaled = flags.values()
  if scaled is None and not mt5:  # transformers 4: one key for both
    scaled = tied
  else:  # transformers 5 writes tie_word_embeddings = true, whatever holds
    scaled = bool(scaled)
    tied = scaled if has_head is None else not has_head
  with naming(source, _KEYS):
    check_limits(max(sizes["num_layers"], sizes["encoder_layers"]), 0)
    activation, gated = _MLPS[mlp]
    return TransformerConfig(
      **sizes,
      num_kv_heads=sizes["num_heads"],
      norm_epsilon=epsilon,
      tied=tied,
      scale_logits=scaled,
      query_scalar=1.0,
      activation=activation,
      gated=gated,
      dtype=dtype,
    )


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns a config.json that `parse` converts back, where it can."""
  mlp = [x for x, y in _MLPS.items() if y == (config.activation, config.gated)]
  rendered = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    **{theirs: getattr(config, ours) for ours, theirs in _KEYS.items()},
    "layer_norm_epsilon": config.norm_epsilon,
    "feed_forward_proj": mlp[0] if mlp else config.activation,
    "tie_word_embeddings": config.tied,
    "pad_token_id": config.start_token,
    "torch_dtype": config.dtype,
  }
  if config.scale_logits != config.tied:
    rendered["scale_decoder_outputs"] = config.scale_logits
  return rendered
