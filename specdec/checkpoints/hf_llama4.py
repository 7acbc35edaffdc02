"""Llama 4's own keys of Hugging Face's config.json.

Layers with rotation attend to chunks, queries of the others are scaled with
their position (attention temperature tuning); some layers of Maverick are
dense, and all of Llama Guard 4.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.hf_values import CHUNKED, FULL, typed
from specdec.models.config import TransformerConfig

_FLAG = "attn_temperature_tuning"
_OF_MIXTURES = "num_experts", "experts_per_token", "shared_width"


def parse(config: Mapping[str, Any], source: str) -> dict[str, Any]:
  """Returns fields of TransformerConfig, where keys and fields are not one.

  Args:
    config: with defaults, and no_rope_layers of every layer.

  Raises:
    ValueError: a value is of another type, or lists contradict each other.
  """
  typed(config, "attention_chunk_size", source)
  kinds = [CHUNKED if x else FULL for x in config["no_rope_layers"]]
  listed = typed(config, "layer_types", source)
  if listed not in (None, kinds):
    raise ValueError(
      f"{source} has layer_types = {listed!r:.200}; accepted: {CHUNKED} where "
      "no_rope_layers has 1, else full_attention"
    )
  count = config["num_hidden_layers"]
  mixtures = typed(config, "moe_layers", source)
  if mixtures is None:
    step = typed(config, "interleave_moe_layer_step", source)
    if step < 1:
      raise ValueError(f"interleave_moe_layer_step = {step}; it must be >= 1")
    mixtures = range(step - 1, count, step)
  if any(type(i) is not int or not 0 <= i < count for i in mixtures):
    raise ValueError(
      f"{source} has moe_layers = {mixtures!r:.200}; each must be in "
      f"0..{count - 1}"
    )
  dense = tuple(i for i in range(count) if i not in mixtures)
  tuned = config[_FLAG]  # a number in the first files
  if type(tuned) not in (bool, int):
    raise ValueError(f"{source} has {_FLAG} = {tuned!r:.60}; true or false")
  growth = float(typed(config, "attn_scale", source)) if tuned else 0.0
  fields: dict[str, Any] = {"unrotated_growth": growth}
  width = typed(config, "intermediate_size_mlp", source) if dense else 0
  if len(dense) == count:
    no_experts = dict.fromkeys(_OF_MIXTURES, 0)
    return fields | no_experts | {"mlp_width": width, "route_inputs": False}
  return fields | {"dense_layers": dense, "dense_width": width}


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns the keys of config.json that `parse` reads."""
  count = config.num_layers
  chunk = max(filter(None, config.windows), default=None)
  mixtures = []
  if config.num_experts:
    mixtures = [i for i in range(count) if i not in config.dense_layers]
  rendered: dict[str, Any] = {
    "intermediate_size": config.mlp_width,
    "moe_layers": mixtures,
    _FLAG: config.unrotated_growth > 0,
    "attn_scale": config.unrotated_growth,
    "layer_types": [
      FULL if i in config.unrotated_layers else CHUNKED for i in range(count)
    ],
  }
  if len(mixtures) < count:
    dense = config.dense_width if mixtures else config.mlp_width
    rendered["intermediate_size_mlp"] = dense
  return rendered | ({"attention_chunk_size": chunk} if chunk else {})
