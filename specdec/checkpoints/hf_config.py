"""config.json of Hugging Face to TransformerConfig and back.

Invariant: every option that changes a model's law is either carried over or
refused by name; nothing is dropped in silence. A missing key means what
transformers takes it to mean for that architecture.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.architectures import (
  ARCHITECTURES,
  KEYS,
  LLAMA_ABSENT,
  ONLY,
  Architecture,
)
from specdec.checkpoints.names import listed
from specdec.models.config import RopeScaling, TransformerConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"
_BOOLEANS = ("tie_word_embeddings", "norm_topk_prob")
_MAY_BE_NONE = ("attn_logit_softcapping", "final_logit_softcapping")

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


def parse(
  config: Mapping[str, Any], source: str, dtype: str
) -> TransformerConfig:
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
  name = names[0] if len(names) == 1 else None
  if name not in ARCHITECTURES:
    raise ValueError(
      f"{source} is of architecture {listed(names) or 'unknown'}; accepted: "
      f"{', '.join(ARCHITECTURES)}"
    )
  architecture = ARCHITECTURES[name]
  for option, accepted in (ONLY | architecture.only).items():
    value = config.get(option, accepted[0])
    if value not in accepted:
      raise ValueError(
        f"{source} has {option} = {value!r}; accepted: {accepted[0]!r}"
      )
  config = _completed(config, architecture)
  fields = {}
  for ours, theirs in (KEYS | architecture.keys).items():
    value = config.get(theirs)
    if theirs in _BOOLEANS:
      value = bool(value)
    elif value is None and theirs in _MAY_BE_NONE:
      pass
    elif not isinstance(value, int | float) or isinstance(value, bool):
      raise ValueError(
        f"{source} has {theirs} = {value!r}; it must be a number"
      )
    fields[ours] = value
  windows = _windows(config, architecture, source)
  return TransformerConfig(
    **fields,
    **architecture.implied,
    **_rope(config, source, local=any(windows)),
    windows=windows,
    dtype=dtype,
  )


def _completed(
  config: Mapping[str, Any], architecture: Architecture
) -> dict[str, Any]:
  """With what its missing keys mean."""
  config = dict(config)
  # Transformers takes either name, and writes the other one than the hub has.
  for one, other in (
    ("num_experts", "num_local_experts"),
    ("num_local_experts", "num_experts"),
  ):
    if one in config:
      config.setdefault(other, config[one])
  config = LLAMA_ABSENT | dict(architecture.absent) | config
  heads, width = config.get("num_attention_heads"), config.get("hidden_size")
  if config.get("num_key_value_heads") is None:
    config["num_key_value_heads"] = heads
  if config.get("head_dim") is None and isinstance(width, int) and heads:
    config["head_dim"] = width // heads
  if not config.get("use_sliding_window", True):
    config["sliding_window"] = None
  return config


def _windows(
  config: Mapping[str, Any], architecture: Architecture, source: str
) -> tuple[int | None, ...]:
  layers, window = config["num_hidden_layers"], config["sliding_window"]
  kinds = config.get("layer_types") if architecture.layer_types else None
  if kinds is None:
    sliding = [architecture.sliding(config, layer) for layer in range(layers)]
  elif len(kinds) == layers and set(kinds) <= {_SLIDING, _FULL}:
    sliding = [kind == _SLIDING for kind in kinds]
  else:
    raise ValueError(
      f"{source} has layer_types = {kinds}; accepted: {_SLIDING} and {_FULL}, "
      "one a layer"
    )
  if not any(sliding):
    return ()
  if window is None:
    raise ValueError(f"{source} has layers of {_SLIDING} and no sliding_window")
  return tuple(window if slides else None for slides in sliding)


def _rope(
  config: Mapping[str, Any], source: str, local: bool
) -> dict[str, Any]:
  """The rotary fields; `local`: whether any layer has a window."""
  # Transformers 5 gathers base and scaling in rope_parameters; before, the base
  # stood on its own and rope_scaling held the rest.
  rope = config.get("rope_parameters") or {}
  old = config.get("rope_scaling") or {}
  theta = config["rope_theta"]
  if "rope_local_base_freq" not in config:
    theta, scaling = _rope_kind(old or rope, theta, source)
    return {"rope_theta": theta, "rope_scaling": scaling}
  unknown = [key for key in rope if key not in (_FULL, _SLIDING)]
  if unknown:
    raise ValueError(
      f"{source} has {listed(unknown)} in rope_parameters; accepted: {_FULL} "
      f"and {_SLIDING}, each with its own"
    )
  theta, scaling = _rope_kind((rope.get(_FULL) or {}) | old, theta, source)
  local_theta, stretched = _rope_kind(
    rope.get(_SLIDING) or {}, config["rope_local_base_freq"], source
  )
  if stretched:
    raise ValueError(
      f"{source} scales the rotary frequencies of {_SLIDING}; accepted: default"
    )
  return {
    "rope_theta": theta,
    "rope_scaling": scaling,
    "local_rope_theta": local_theta if local else None,
  }


def _rope_kind(
  rope: Mapping[str, Any], theta: float, source: str
) -> tuple[float, RopeScaling | None]:
  theta = rope.get("rope_theta", theta)
  if not isinstance(theta, int | float):
    raise ValueError(
      f"{source} has rope_theta = {theta!r}; it must be a number"
    )
  kind = rope.get("rope_type", rope.get("type", "default"))
  nested = [key for key in rope if isinstance(rope[key], Mapping)]
  if nested:
    raise ValueError(
      f"{source} has rotary frequencies of their own for {listed(nested)}"
    )
  if rope.get("partial_rotary_factor") not in (None, 1):
    raise ValueError(
      f"{source} has partial_rotary_factor = {rope['partial_rotary_factor']}; "
      "accepted: 1.0"
    )
  if kind == "default":
    return float(theta), None
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
  return float(theta), RopeScaling(kind, **numbers)


def render(config: TransformerConfig) -> dict[str, Any]:
  """A config.json that `parse` reads back as `config`.

  Raises:
    ValueError: no architecture has these options together.
  """
  if not any(config.windows):
    config = dataclasses.replace(config, windows=())
  misses = []
  for name in ARCHITECTURES:
    rendered = _render(config, name)
    try:
      got = parse(rendered, name, config.dtype)
    except ValueError:
      continue
    differing = [
      field.name
      for field in dataclasses.fields(config)
      if getattr(got, field.name) != getattr(config, field.name)
    ]
    if not differing:
      return rendered
    misses.append((differing, name))
  differing, name = min(misses, key=lambda miss: len(miss[0]))
  raise ValueError(
    f"no Hugging Face architecture has these options together; {name} comes "
    f"nearest and differs in {listed(differing)}"
  )


def _render(config: TransformerConfig, name: str) -> dict[str, Any]:
  """What `config` is as this architecture, as far as it goes."""
  architecture = ARCHITECTURES[name]
  rendered = {
    "architectures": [name],
    "model_type": architecture.model_type,
    "rope_theta": config.rope_theta,
    "torch_dtype": config.dtype,
  }
  for ours, theirs in (KEYS | architecture.keys).items():
    rendered[theirs] = getattr(config, ours)
  for option in ("hidden_act", "hidden_activation"):
    if option in architecture.only:
      rendered[option] = architecture.only[option][0]
  if config.local_rope_theta is not None:
    rendered["rope_local_base_freq"] = config.local_rope_theta
  if config.rope_scaling is not None:
    kind = config.rope_scaling.kind
    rendered["rope_scaling"] = {"rope_type": kind} | {
      theirs: getattr(config.rope_scaling, ours)
      for theirs, ours in _ROPE_FIELDS[kind].items()
    }
  window = max(filter(None, config.windows), default=None)
  if window or "sliding_window" in architecture.absent:
    rendered["sliding_window"] = window
  if "use_sliding_window" in architecture.absent:
    rendered["use_sliding_window"] = window is not None
  if architecture.layer_types:
    rendered["layer_types"] = [
      _SLIDING if w else _FULL for w in config.windows
    ] or [_FULL] * config.num_layers
  return rendered
