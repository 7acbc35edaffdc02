"""Types and accepted values of the keys in Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CHUNKED = "linear_attention", "chunked_attention"
# Types of the keys that are read; all others are integers.
_FLOATS = (
  *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor"),
  *("low_freq_factor", "high_freq_factor", "query_pre_attn_scalar"),
  *("attn_logit_softcapping", "final_logit_softcapping"),
  *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
  "partial_rotary_factor",
  "swiglu_limit",
  "attn_scale",
  "routed_scaling_factor",
)
BOOLEANS = ("tie_word_embeddings", "norm_topk_prob", "truncate")
BOOLEANS += ("mamba_conv_bias", "use_qk_norm", "rope_interleave")
BOOLEANS += ("use_sliding_window",)
_LISTS = ("layer_types", "no_rope_layers", "short_factor", "long_factor")
_LISTS += ("attn_layer_indices", "moe_layers")
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", SLIDING, FULL)
_MAY_BE_NONE = (
  *("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"),
  *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
  *("layer_types", "no_rope_layers", "partial_rotary_factor", "factor"),
  "pard_token",
  "q_lora_rank",
  *("attn_layer_indices", "moe_layers"),
  *BOOLEANS,
  *_OBJECTS,
)


def _is_number(value: Any) -> bool:
  # NaN fails the comparison.
  return type(value) in (int, float) and abs(value) < 1e38


def typed(config: Mapping[str, Any], key: str, source: str) -> Any:
  """Returns the value of `key`, after checking its type.

  Raises:
    ValueError: it is of another type, beginning with `source`.
  """
  value = config.get(key)
  if value is None and key in _MAY_BE_NONE:
    return None
  if key in _FLOATS:
    valid, expected = _is_number(value), "a number below 1e38"
    if valid and abs(value) >= 2**31:  # overflows JAX's integers
      value = float(value)
  elif key in BOOLEANS:
    valid, expected = isinstance(value, bool), "true or false"
  elif key in _OBJECTS:
    valid, expected = isinstance(value, dict), "an object"
  elif key in _LISTS:
    valid, expected = isinstance(value, list), "a list"
    if valid and key.endswith("_factor"):
      valid, expected = all(map(_is_number, value)), "a list of numbers"
  else:
    valid = type(value) is int and abs(value) < 2**31
    expected = "an integer below 2**31"
  if not valid:
    raise ValueError(
      f"{source} has {key} = {value!r:.60}; it must be {expected}"
    )
  return value


def check_options(
  found: Mapping[str, Any], what: str, **options: tuple
) -> None:
  """Raises ValueError where an option has none of its accepted values.

  Args:
    options: name -> accepted values, None for a missing option.
  """
  for name, accepted in options.items():
    if found.get(name) not in accepted:
      raise ValueError(
        f"{what} has {name} = {found.get(name)!r:.60}; accepted: "
        f"{' or '.join(repr(x) for x in accepted if x is not None)}"
      )
