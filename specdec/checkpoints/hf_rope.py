"""Rotary embeddings in Hugging Face's config.json: bases, scalings, parts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.architectures import Architecture
from specdec.checkpoints.hf_values import FULL, SLIDING, typed
from specdec.models.config import TransformerConfig
from specdec.models.rope_scaling import LongRope, RopeScaling, Scaling, Yarn
from specdec.utils.spelling import join_names, naming

_ORIGINAL = "original_max_position_embeddings"
_MAXIMUM = "max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
# Kind of rope scaling -> {required key: field of its class}.
_FIELDS = {
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    _ORIGINAL: "original_length",
  },
  "yarn": {
    "factor": "factor",
    _ORIGINAL: "original_length",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
  },
  "longrope": {
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "attention_factor": "attention_factor",
  },
}
# Names of longrope in older files of an architecture that has no other.
_OLDER = ("su", "yarn")


def parse(
  config: Mapping[str, Any],
  source: str,
  local: bool,
  head_dim: int,
  architecture: Architecture,
) -> dict[str, Any]:
  """Returns the rotary fields of TransformerConfig.

  Args:
    local: whether any layer has a window.
    architecture: which may rotate a part of a head, or have no other scaling
      than longrope.

  Raises:
    ValueError: an option is not implemented, or a number is missing.
  """
  # Transformers 5 stores base and scaling in rope_parameters; older versions
  # use the keys rope_theta and rope_scaling.
  rope = typed(config, "rope_parameters", source) or {}
  legacy = typed(config, "rope_scaling", source) or {}
  theta, is_phi = config["rope_theta"], architecture.is_phi
  in_part = is_phi or architecture.recurrence is not None
  if "rope_local_base_freq" not in config:
    rope = legacy or rope
    dims = _rotated(config, rope, source, head_dim, in_part)
    theta, scaling = _kind(config, rope, theta, source, is_phi)
    if architecture.has_latent:
      scaling = _with_score_growth(scaling, rope, source)
    fields = {"rope_theta": theta, "rope_scaling": scaling}
    return fields | ({} if dims == head_dim else {"rotary_dims": dims})
  unknown = [key for key in rope if key not in (FULL, SLIDING)]
  if unknown:
    raise ValueError(
      f"{source} has {join_names(unknown)} in rope_parameters; accepted: "
      f"{FULL} and {SLIDING}, each with parameters of its own"
    )
  full, sliding = (typed(rope, key, source) or {} for key in (FULL, SLIDING))
  for part in (full | legacy, sliding):
    _rotated(config, part, source, head_dim, in_part)
  theta, scaling = _kind(config, full | legacy, theta, source)
  local_theta, local_scaling = _kind(
    config, sliding, config["rope_local_base_freq"], source
  )
  if local_scaling:
    raise ValueError(
      f"{source} scales the rotary frequencies of {SLIDING}; accepted: default"
    )
  return {
    "rope_theta": theta,
    "rope_scaling": scaling,
    "local_rope_theta": local_theta if local else None,
  }


def _rotated(config, rope, source: str, head_dim: int, in_part: bool) -> int:
  """Returns how many dimensions of a head are rotated."""
  share = typed({_PARTIAL: config.get(_PARTIAL)} | rope, _PARTIAL, source)
  if share in (None, 1):
    return head_dim
  if not in_part:
    raise ValueError(f"{source} has {_PARTIAL} = {share}; accepted: 1.0")
  return int(head_dim * share)


def _with_score_growth(scaling: Scaling | None, rope, source: str):
  """Returns a scaling with DeepSeek's factor on the scores."""
  growth = typed(rope, "mscale_all_dim", source)
  if scaling is None or not growth:
    return scaling
  if not isinstance(scaling, Yarn):
    raise ValueError(
      f"{source} has mscale_all_dim = {growth} with rope {scaling.kind!r}; "
      "accepted: yarn"
    )
  with naming(source, {"score_growth": "mscale_all_dim"}):
    return dataclasses.replace(scaling, score_growth=float(growth))


def _kind(
  config: Mapping[str, Any],
  rope: Mapping[str, Any],
  theta: float,
  source: str,
  is_phi: bool = False,
) -> tuple[float, Scaling | None]:
  theta = typed({"rope_theta": theta} | rope, "rope_theta", source)
  kind = rope.get("rope_type", rope.get("type", "default"))
  nested = [key for key in rope if isinstance(rope[key], Mapping)]
  if nested:
    raise ValueError(
      f"{source} has separate rotary frequencies for {join_names(nested)}, "
      "which this architecture does not support"
    )
  if is_phi and kind in _OLDER:
    kind = "longrope"
  if kind == "default":
    return float(theta), None
  valid = ("longrope",) if is_phi else tuple(_FIELDS)
  if kind not in valid:  # a tuple, since kind may be unhashable
    raise ValueError(
      f"{source} scales its rotary frequencies by {kind!r:.60}; accepted: "
      f"default, {', '.join(valid)}"
    )
  if kind in ("yarn", "longrope"):
    rope = _completed(config, rope, kind, source)
  fields = _FIELDS[kind]
  missing = [key for key in fields if key not in rope]
  if missing:
    raise ValueError(f"{source} lacks {join_names(missing)} of rope {kind!r}")
  numbers = {ours: typed(rope, key, source) for key, ours in fields.items()}
  with naming(source, {ours: key for key, ours in fields.items()}):
    if kind == "yarn":
      return float(theta), Yarn(**numbers)
    if kind == "longrope":
      lists = {
        name: tuple(map(float, numbers.pop(name)))
        for name in ("short_factors", "long_factors")
      }
      return float(theta), LongRope(
        **lists,
        **numbers,
        original_length=rope[_ORIGINAL],
        max_length=rope[_MAXIMUM],
      )
    return float(theta), RopeScaling(kind, **numbers)


def _completed(config, rope, kind: str, source: str) -> dict[str, Any]:
  """Returns the parameters with what transformers derives of missing ones."""
  rope = dict(rope)
  maximum = config.get(_MAXIMUM)
  # A length outside of the object goes before one in it.
  for length in (config.get(_ORIGINAL), rope.get(_ORIGINAL), maximum):
    if length is not None:
      rope[_ORIGINAL] = length
      break
  if kind == "longrope" and maximum is not None:
    rope[_MAXIMUM] = maximum
  needed = [_ORIGINAL] + [_MAXIMUM] * (kind == "longrope")
  if missing := [key for key in needed if key not in rope]:
    raise ValueError(f"{source} lacks {join_names(missing)} of rope {kind!r}")
  original = typed(rope, _ORIGINAL, source)
  factor = typed(rope, "factor", source)
  if factor is None:
    maximum = typed({_MAXIMUM: maximum}, _MAXIMUM, source)
    factor = maximum / max(original, 1)
  if typed(rope, "attention_factor", source) is None:
    rope["attention_factor"] = _attention_factor(rope, kind, factor, source)
  if kind == "longrope":
    typed(rope, _MAXIMUM, source)
    return rope
  rope["factor"] = factor
  for key, default in ("beta_fast", 32.0), ("beta_slow", 1.0):
    rope[key] = typed(rope, key, source) or default
  if typed(rope, "truncate", source) is None:
    rope["truncate"] = True
  return rope


def _attention_factor(rope, kind: str, factor: float, source: str) -> float:
  if factor <= 1:
    return 1.0
  if kind == "longrope":
    original = rope[_ORIGINAL]
    return math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
  scales = [typed(rope, key, source) for key in ("mscale", "mscale_all_dim")]
  if not all(scales):
    scales = [1.0, 0.0]
  over, under = (0.1 * scale * math.log(factor) + 1 for scale in scales)
  return over / under if under else math.inf


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns the keys of config.json that `parse` reads."""
  rendered: dict[str, Any] = {"rope_theta": config.rope_theta}
  if config.local_rope_theta is not None:
    rendered["rope_local_base_freq"] = config.local_rope_theta
  if config.rotary_dims is not None and config.latent is None:
    share = config.rotary_dims / config.head_dim
    if int(config.head_dim * share) < config.rotary_dims:
      share = math.nextafter(share, 1)
    rendered[_PARTIAL] = share
  scaling = config.rope_scaling
  if scaling is None:
    return rendered
  rope = {"rope_type": scaling.kind}
  for theirs, ours in _FIELDS[scaling.kind].items():
    value = getattr(scaling, ours)
    rope[theirs] = list(value) if isinstance(value, tuple) else value
  if isinstance(scaling, Yarn) and scaling.score_growth:
    rope["mscale_all_dim"] = scaling.score_growth
  if isinstance(scaling, LongRope):
    rope[_ORIGINAL] = rendered[_ORIGINAL] = scaling.original_length
    rendered[_MAXIMUM] = scaling.max_length
  return rendered | {"rope_scaling": rope}
