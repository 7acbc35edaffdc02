"""Recurrent layers in Hugging Face's config.json: Qwen3-Next's and Bamba's."""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.hf_values import FULL, LINEAR, typed
from specdec.models.config import TransformerConfig
from specdec.models.parts import GATED_DELTA, MAMBA2, Recurrence
from specdec.utils.spelling import naming

# Field of Recurrence -> key of config.json, by kind.
KEYS = {
  GATED_DELTA: {
    "num_heads": "linear_num_value_heads",
    "num_key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
  },
  MAMBA2: {
    "num_heads": "mamba_n_heads",
    "num_key_heads": "mamba_n_groups",
    "key_dim": "mamba_d_state",
    "value_dim": "mamba_d_head",
    "kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
  },
}


def parse(
  config: Mapping[str, Any], kind: str, source: str
) -> Recurrence | None:
  """Returns the recurrent layers; None: all have attention.

  Raises:
    ValueError: a size is missing, or layers are of an unknown kind.
  """
  config = dict(config)
  if kind == MAMBA2 and config.get("mamba_d_head") in (None, "auto"):
    inner = typed(config, "mamba_expand", source) * config["hidden_size"]
    heads = typed(config, "mamba_n_heads", source)
    config["mamba_d_head"] = inner // max(heads, 1)
  sizes = {
    ours: typed(config, theirs, source) for ours, theirs in KEYS[kind].items()
  }
  layers = _layers(config, kind, source)
  if not layers:
    return None
  with naming(source, KEYS[kind]):
    recurrence = Recurrence(kind, layers, **sizes)
  if kind == MAMBA2:
    inner = typed(config, "mamba_expand", source) * config["hidden_size"]
    if inner != recurrence.num_heads * recurrence.value_dim:
      raise ValueError(
        f"{source} has {recurrence.num_heads} heads of "
        f"{recurrence.value_dim} in its Mamba layers, which are {inner} wide"
      )
  return recurrence


def _layers(config, kind: str, source: str) -> tuple[int, ...]:
  count = config["num_hidden_layers"]
  if kind == MAMBA2:
    attends = typed(config, "attn_layer_indices", source) or []
    if any(type(i) is not int or not 0 <= i < count for i in attends):
      raise ValueError(
        f"{source} has attn_layer_indices = {attends!r:.200}; each must be in "
        f"0..{count - 1}"
      )
    return tuple(i for i in range(count) if i not in attends)
  kinds = typed(config, "layer_types", source)
  if kinds is None:
    every = typed(config, "full_attention_interval", source)
    if every < 1:
      raise ValueError(f"full_attention_interval = {every}; it must be >= 1")
    return tuple(i for i in range(count) if (i + 1) % every)
  if len(kinds) != count or any(x not in (LINEAR, FULL) for x in kinds):
    raise ValueError(
      f"{source} has layer_types = {kinds!r:.200}; accepted: {LINEAR} or "
      f"{FULL} for each layer"
    )
  return tuple(i for i, x in enumerate(kinds) if x == LINEAR)


def render(config: TransformerConfig, kind: str) -> dict[str, Any]:
  """Returns the keys of config.json that `parse` reads."""
  recurrence = config.recurrence
  if recurrence is None or recurrence.kind != kind:
    return {}
  rendered: dict[str, Any] = {
    theirs: getattr(recurrence, ours) for ours, theirs in KEYS[kind].items()
  }
  is_recurrent = [config.is_recurrent(i) for i in range(config.num_layers)]
  if kind == GATED_DELTA:
    kinds = [LINEAR if x else FULL for x in is_recurrent]
    return rendered | {"layer_types": kinds}
  inner = recurrence.num_heads * recurrence.value_dim
  return rendered | {
    "attn_layer_indices": [i for i, x in enumerate(is_recurrent) if not x],
    "mamba_expand": inner // config.width,
  }
