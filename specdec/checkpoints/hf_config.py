"""Converts Hugging Face's config.json to TransformerConfig and back.

Invariant: every option that affects a model's distribution is either converted
or rejected by name. A missing key has the default of transformers for that
architecture.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints import t5_config
from specdec.checkpoints.architectures import (
  ARCHITECTURES,
  KEYS,
  LLAMA_ABSENT,
  ONLY,
  Architecture,
)
from specdec.models.config import (
  RopeScaling,
  TransformerConfig,
  check_limits,
)
from specdec.utils.spelling import join_names, naming

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Types of the keys that are read; all others are integers.
_FLOATS = (
  *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor"),
  *("low_freq_factor", "high_freq_factor", "query_pre_attn_scalar"),
  *("attn_logit_softcapping", "final_logit_softcapping"),
)
_BOOLEANS = ("tie_word_embeddings", "norm_topk_prob")
_OBJECTS = ("rope_scaling", "rope_parameters", _SLIDING, _FULL)
_MAY_BE_NONE = (
  *("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"),
  *("layer_types", *_BOOLEANS, *_OBJECTS),
)

# Kind of rope scaling -> {required key: field of RopeScaling}.
_ROPE_FIELDS = {
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
  },
}


def _architectures(config: Mapping[str, Any]) -> list[str]:
  names = config.get("architectures") or []
  return list(map(str, names if isinstance(names, list) else [names]))


def needs_weights(config: Mapping[str, Any]) -> bool:
  """Whether `parse` must know what the files hold: of T5, whether a head."""
  return not t5_config.ARCHITECTURES.keys().isdisjoint(_architectures(config))


def parse(
  config: Mapping[str, Any],
  source: str,
  dtype: str,
  has_head: bool | None = None,
) -> TransformerConfig:
  """Converts a decoded config.json, to load the weights in `dtype`.

  Args:
    has_head: whether the files hold a vocabulary projection; None: unknown.

  Raises ValueError, beginning with `source`, where the architecture or an
  option is not implemented, or a size is missing.
  """
  names = _architectures(config)
  name = names[0] if len(names) == 1 else None
  if name in t5_config.ARCHITECTURES:
    return t5_config.parse(config, source, dtype, has_head)
  if name not in ARCHITECTURES:
    accepted = ", ".join({**ARCHITECTURES, **t5_config.ARCHITECTURES})
    raise ValueError(
      f"{source} is of architecture {join_names(names) or 'unknown'}; "
      f"accepted: {accepted}"
    )
  architecture = ARCHITECTURES[name]
  for option, accepted in (ONLY | architecture.only).items():
    value = config.get(option, accepted[0])
    if value not in accepted:
      raise ValueError(
        f"{source} has {option} = {value!r}; accepted: {accepted[0]!r}"
      )
  config = _with_defaults(config, architecture)
  fields = {}
  for ours, theirs in (KEYS | architecture.keys).items():
    value = _typed(config, theirs, source)
    fields[ours] = bool(value) if theirs in _BOOLEANS else value
  with naming(source):
    check_limits(fields["num_layers"], fields.get("num_experts", 0))
    windows = _windows(config, architecture, source)
    return TransformerConfig(
      **fields,
      **architecture.implied,
      **_rope(config, source, local=any(windows)),
      windows=windows,
      dtype=dtype,
    )


def _typed(config: Mapping[str, Any], key: str, source: str) -> Any:
  """Returns the value of `key`, after checking its type."""
  value = config.get(key)
  if value is None and key in _MAY_BE_NONE:
    return None
  if key in _FLOATS:
    valid = type(value) in (int, float) and abs(value) < 1e38  # excludes NaN
    expected = "a number below 1e38"
    if valid and abs(value) >= 2**31:  # overflows JAX's integers
      value = float(value)
  elif key in _BOOLEANS:
    valid, expected = isinstance(value, bool), "true or false"
  elif key in _OBJECTS:
    valid, expected = isinstance(value, dict), "an object"
  elif key == "layer_types":
    valid, expected = isinstance(value, list), "a list"
  else:
    valid = type(value) is int and abs(value) < 2**31
    expected = "an integer below 2**31"
  if not valid:
    raise ValueError(
      f"{source} has {key} = {value!r:.60}; it must be {expected}"
    )
  return value


def _with_defaults(
  config: Mapping[str, Any], architecture: Architecture
) -> dict[str, Any]:
  """Returns the config with the defaults of its missing keys."""
  config = dict(config)
  # transformers reads both names, and writes another than the hub's files use.
  experts = {"num_experts", "num_local_experts"}
  for name in experts & config.keys():
    config = dict.fromkeys(experts, config[name]) | config
  config = LLAMA_ABSENT | dict(architecture.absent) | config
  heads, width = config.get("num_attention_heads"), config.get("hidden_size")
  if config.get("num_key_value_heads") is None:
    config["num_key_value_heads"] = heads
  if config.get("head_dim") is None and {type(width), type(heads)} == {int}:
    config["head_dim"] = width // max(heads, 1)
  if not config.get("use_sliding_window", True):
    config["sliding_window"] = None
  return config


def _windows(
  config: Mapping[str, Any], architecture: Architecture, source: str
) -> tuple[int | None, ...]:
  layers = config["num_hidden_layers"]
  window = _typed(config, "sliding_window", source)
  kinds = None
  if architecture.layer_types:
    kinds = _typed(config, "layer_types", source)
  if kinds is None:
    for key in ("max_window_layers", "sliding_window_pattern"):
      if key in architecture.absent and window is not None:
        _typed(config, key, source)
    if config.get("sliding_window_pattern") == 0:
      raise ValueError("sliding_window_pattern = 0; it must be >= 1")
    sliding = [architecture.sliding(config, layer) for layer in range(layers)]
  elif len(kinds) == layers and all(k in (_SLIDING, _FULL) for k in kinds):
    sliding = [kind == _SLIDING for kind in kinds]
  else:
    raise ValueError(
      f"{source} has layer_types = {kinds!r:.200}; accepted: {_SLIDING} or "
      f"{_FULL} for each layer"
    )
  if not any(sliding):
    return ()
  if window is None:
    raise ValueError(
      f"{source} has layers with {_SLIDING} and no sliding_window"
    )
  return tuple(window if slides else None for slides in sliding)


def _rope(
  config: Mapping[str, Any], source: str, local: bool
) -> dict[str, Any]:
  """Returns the rotary fields; `local`: whether any layer has a window."""
  # Transformers 5 stores base and scaling in rope_parameters; older versions
  # use the keys rope_theta and rope_scaling.
  rope = _typed(config, "rope_parameters", source) or {}
  legacy = _typed(config, "rope_scaling", source) or {}
  theta = config["rope_theta"]
  if "rope_local_base_freq" not in config:
    theta, scaling = _rope_kind(legacy or rope, theta, source)
    return {"rope_theta": theta, "rope_scaling": scaling}
  unknown = [key for key in rope if key not in (_FULL, _SLIDING)]
  if unknown:
    raise ValueError(
      f"{source} has {join_names(unknown)} in rope_parameters; accepted: "
      f"{_FULL} and {_SLIDING}, each with parameters of its own"
    )
  full, sliding = (_typed(rope, key, source) or {} for key in (_FULL, _SLIDING))
  theta, scaling = _rope_kind(full | legacy, theta, source)
  local_theta, local_scaling = _rope_kind(
    sliding, config["rope_local_base_freq"], source
  )
  if local_scaling:
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
  theta = _typed({"rope_theta": theta} | rope, "rope_theta", source)
  kind = rope.get("rope_type", rope.get("type", "default"))
  nested = [key for key in rope if isinstance(rope[key], Mapping)]
  if nested:
    raise ValueError(
      f"{source} has separate rotary frequencies for {join_names(nested)}, "
      "which this architecture does not support"
    )
  if rope.get("partial_rotary_factor") not in (None, 1):
    raise ValueError(
      f"{source} has partial_rotary_factor = {rope['partial_rotary_factor']}; "
      "accepted: 1.0"
    )
  if kind == "default":
    return float(theta), None
  if kind not in tuple(_ROPE_FIELDS):  # a tuple, since kind may be unhashable
    raise ValueError(
      f"{source} scales its rotary frequencies by {kind!r:.60}; accepted: "
      f"default, {', '.join(_ROPE_FIELDS)}"
    )
  fields = _ROPE_FIELDS[kind]
  missing = [key for key in fields if key not in rope]
  if missing:
    raise ValueError(f"{source} lacks {join_names(missing)} of rope {kind!r}")
  numbers = {ours: _typed(rope, key, source) for key, ours in fields.items()}
  return float(theta), RopeScaling(kind, **numbers)


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns a config.json that `parse` converts back to `config`.

  Raises ValueError where no architecture has this combination of options.
  """
  if not any(config.windows):
    config = dataclasses.replace(config, windows=())
  candidates = []
  names = [*ARCHITECTURES]
  if config.encoder_layers:
    names = ["T5ForConditionalGeneration"]
  for name in names:
    rendered = _render(config, name)
    try:
      parsed = vars(parse(rendered, name, config.dtype, not config.tied))
    except ValueError:
      continue
    differing = [x for x in parsed if parsed[x] != getattr(config, x)]
    if not differing:
      return rendered
    candidates.append((differing, name))
  differing, name = min(candidates, key=lambda candidate: len(candidate[0]))
  raise ValueError(
    "no Hugging Face architecture has this combination of options; the closest "
    f"is {name} and differs in {join_names(differing)}"
  )


def _render(config: TransformerConfig, name: str) -> dict[str, Any]:
  """Renders `config` as one architecture, ignoring what it cannot express."""
  if name in t5_config.ARCHITECTURES:
    return t5_config.render(config)
  architecture = ARCHITECTURES[name]
  rendered = {
    "architectures": [name],
    "model_type": architecture.model_type,
    "rope_theta": config.rope_theta,
    "torch_dtype": config.dtype,
  }
  keys = KEYS | architecture.keys
  rendered |= {theirs: getattr(config, ours) for ours, theirs in keys.items()}
  for option in architecture.only.keys() & {"hidden_act", "hidden_activation"}:
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
