"""Llama 4's own keys of Hugging Face's config.json.

Layers with rotation attend to chunks, queries of the others grow by position;
some layers of Maverick are dense.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.hf_values import CHUNKED, FULL, typed
from specdec.models.config import TransformerConfig

_FLAG = "attn_temperature_tuning"


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
  return {
    "dense_layers": dense,
    "dense_width": typed(config, "intermediate_size_mlp", source)
    if dense
    else 0,
    "unrotated_growth": float(typed(config, "attn_scale", source))
    if tuned
    else 0.0,
  }


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns the keys of config.json that `parse` reads."""
  count = config.num_layers
  chunk = max(filter(None, config.windows), default=None)
  rendered: dict[str, Any] = {
    "moe_layers": [i for i in range(count) if i not in config.dense_layers],
    _FLAG: config.unrotated_growth > 0,
    "attn_scale": config.unrotated_growth,
    "layer_types": [
      FULL if i in config.unrotated_layers else CHUNKED for i in range(count)
    ],
  }
  if config.dense_width:
    rendered["intermediate_size_mlp"] = config.dense_width
  return rendered | ({"attention_chunk_size": chunk} if chunk else {})
