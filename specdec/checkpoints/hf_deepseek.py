"""DeepSeek-V3's own keys of Hugging Face's config.json.

Attention keeps latent vectors, experts are routed by groups, and the first
layers are dense.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.hf_values import typed
from specdec.models.config import TransformerConfig
from specdec.models.parts import GroupRouting, Latent
from specdec.utils.spelling import naming

# Field -> key.
_LATENT = {
  "rank": "kv_lora_rank",
  "key_dim": "qk_nope_head_dim",
  "rotary_dims": "qk_rope_head_dim",
  "value_dim": "v_head_dim",
  "query_rank": "q_lora_rank",
}
_ROUTING = {
  "groups": "n_group",
  "groups_per_token": "topk_group",
  "scale": "routed_scaling_factor",
}


def parse(config: Mapping[str, Any], source: str) -> dict[str, Any]:
  """Returns fields of TransformerConfig, where keys and fields are not one.

  Args:
    config: with defaults.

  Raises:
    ValueError: a value is of another type, or out of range.
  """

  def read(table: Mapping[str, str]) -> dict[str, Any]:
    return {ours: typed(config, x, source) for ours, x in table.items()}

  with naming(source, _LATENT | _ROUTING):
    latent, routing = Latent(**read(_LATENT)), GroupRouting(**read(_ROUTING))
  dense = typed(config, "first_k_dense_replace", source)
  if not 0 <= dense <= config["num_hidden_layers"]:
    raise ValueError(
      f"{source} has first_k_dense_replace = {dense}; the model has "
      f"{config['num_hidden_layers']} layers"
    )
  width = typed(config, "intermediate_size", source)
  shared = typed(config, "n_shared_experts", source)
  return {
    "num_kv_heads": 1,
    "head_dim": latent.key_dim + latent.rotary_dims,
    "rotary_dims": latent.rotary_dims,
    "latent": latent,
    "routing": dataclasses.replace(routing, scale=float(routing.scale)),
    "dense_layers": tuple(range(dense)),
    "dense_width": width if dense else 0,
    "shared_width": shared * config["moe_intermediate_size"],
  }


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns the keys of config.json that `parse` reads."""
  latent, routing = config.latent, config.routing
  if latent is None or routing is None:
    return {}
  rendered = {theirs: getattr(latent, x) for x, theirs in _LATENT.items()}
  rendered |= {theirs: getattr(routing, x) for x, theirs in _ROUTING.items()}
  return rendered | {
    "num_key_value_heads": config.num_heads,
    "head_dim": latent.rotary_dims,
    "first_k_dense_replace": len(config.dense_layers),
    "intermediate_size": config.dense_width or config.mlp_width,
    "n_shared_experts": config.shared_width // config.mlp_width,
    "num_nextn_predict_layers": 0,
  }
