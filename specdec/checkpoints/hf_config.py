"""Converts Hugging Face's config.json to TransformerConfig and back.

Invariant: every option that affects a model's distribution is either converted
or rejected by name. A missing key has the default of transformers for that
architecture.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.checkpoints import (
  hf_deepseek,
  hf_llama4,
  hf_recurrence,
  hf_rope,
  t5_config,
)
from specdec.checkpoints.architectures import (
  ARCHITECTURES,
  KEYS,
  LLAMA_ABSENT,
  ONLY,
  WITH_IMAGES,
  Architecture,
)
from specdec.checkpoints.hf_values import BOOLEANS, FULL, SLIDING, typed
from specdec.models.config import TransformerConfig, check_limits
from specdec.models.parts import Recurrence
from specdec.utils.spelling import join_names, naming


def architectures(config: Mapping[str, Any]) -> list[str]:
  """Returns what a decoded config.json gives as its architectures."""
  names = config.get("architectures") or []
  return list(map(str, names if isinstance(names, list) else [names]))


def needs_weights(config: Mapping[str, Any]) -> bool:
  """Whether `parse` must know what the files hold: of T5, whether a head."""
  return not t5_config.ARCHITECTURES.keys().isdisjoint(architectures(config))


def is_fused(config: Mapping[str, Any]) -> bool:
  """Whether files hold several matrices as one."""
  names = architectures(config)
  if len(names) != 1:
    return False
  name, _ = WITH_IMAGES.get(names[0], (names[0], {}))
  return name in ARCHITECTURES and ARCHITECTURES[name].fuses


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
  names = architectures(config)
  name = names[0] if len(names) == 1 else None
  if name in t5_config.ARCHITECTURES:
    return t5_config.parse(config, source, dtype, has_head)
  if name in WITH_IMAGES:
    name, absent = WITH_IMAGES[name]
    text = typed(config, "text_config", source) or {}
    tied = typed(config, "tie_word_embeddings", source)
    whole = {} if tied is None else {"tie_word_embeddings": tied}
    config = absent | text | whole
  if name not in ARCHITECTURES:
    accepted = ", ".join(
      {**ARCHITECTURES, **WITH_IMAGES, **t5_config.ARCHITECTURES}
    )
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
  config = _with_defaults(config, architecture, source)
  fields, keys = {}, KEYS | architecture.keys
  for ours, theirs in keys.items():
    value = typed(config, theirs, source)
    fields[ours] = bool(value) if theirs in BOOLEANS else value
  with naming(source, keys):
    check_limits(fields["num_layers"], fields.get("num_experts", 0))
    if "no_rope_layers" in architecture.absent:
      rotated = config["no_rope_layers"] = _rotated(config, source)
      unrotated = (i for i, rotates in enumerate(rotated) if not rotates)
      fields["unrotated_layers"] = tuple(unrotated)
    if architecture.has_chunks:
      fields |= hf_llama4.parse(config, source)
      config["sliding_window"] = config["attention_chunk_size"]
    if architecture.has_latent:
      fields |= hf_deepseek.parse(config, source)
    windows = _windows(config, architecture, source)
    rope = hf_rope.parse(
      config, source, any(windows), fields["head_dim"], architecture
    )
    if architecture.recurrence:
      fields["recurrence"] = hf_recurrence.parse(
        config, architecture.recurrence, source
      )
    fields = {**architecture.implied, **fields, **rope}
    return TransformerConfig(**fields, windows=windows, dtype=dtype)


def _with_defaults(
  config: Mapping[str, Any], architecture: Architecture, source: str
) -> dict[str, Any]:
  """Returns the config with the defaults of its missing keys."""
  config = dict(config)
  # transformers reads both names, and writes another than the hub's files use.
  experts = {"num_experts", "num_local_experts"}
  for name in experts & config.keys():
    config = dict.fromkeys(experts, config[name]) | config
  rope = "rope_parameters"
  if rope in architecture.absent and config.get(rope, 0) is None:
    del config[rope]  # transformers' default, too
  config = LLAMA_ABSENT | dict(architecture.absent) | config
  heads, width = config.get("num_attention_heads"), config.get("hidden_size")
  if config.get("num_key_value_heads") is None:
    config["num_key_value_heads"] = heads
  if config.get("head_dim") is None and {type(width), type(heads)} == {int}:
    config["head_dim"] = width // max(heads, 1)
  key = "use_sliding_window"
  if key in config and not typed(config, key, source):
    config["sliding_window"] = None
  return config


def _rotated(config: Mapping[str, Any], source: str) -> list[int]:
  """Returns 1 for a layer with rotary embeddings, and 0, as no_rope_layers."""
  layers = config["num_hidden_layers"]
  rotated = typed(config, "no_rope_layers", source)
  if not rotated:
    every = typed(config, "no_rope_layer_interval", source)
    if every < 1:
      raise ValueError(f"no_rope_layer_interval = {every}; it must be >= 1")
    return [int((i + 1) % every > 0) for i in range(layers)]
  if len(rotated) < layers or any(
    type(x) not in (int, bool) or x not in (0, 1) for x in rotated
  ):
    raise ValueError(
      f"{source} has no_rope_layers = {rotated!r:.200}; accepted: 1 with "
      "rotary embeddings, or 0, for each layer"
    )
  return rotated[:layers]


def _windows(
  config: Mapping[str, Any], architecture: Architecture, source: str
) -> tuple[int | None, ...]:
  layers = config["num_hidden_layers"]
  window = typed(config, "sliding_window", source)
  kinds = None
  if architecture.layer_types:
    kinds = typed(config, "layer_types", source)
  if kinds is None:
    for key in ("max_window_layers", "sliding_window_pattern"):
      if key in architecture.absent and window is not None:
        typed(config, key, source)
    if config.get("sliding_window_pattern") == 0:
      raise ValueError("sliding_window_pattern = 0; it must be >= 1")
    sliding = [architecture.sliding(config, layer) for layer in range(layers)]
  elif len(kinds) == layers and all(k in (SLIDING, FULL) for k in kinds):
    sliding = [kind == SLIDING for kind in kinds]
  else:
    raise ValueError(
      f"{source} has layer_types = {kinds!r:.200}; accepted: {SLIDING} or "
      f"{FULL} for each layer"
    )
  listed = config.get("layer_types")
  derived = [SLIDING if slides else FULL for slides in sliding]
  # With others, a config is Ministral to transformers.
  if architecture.model_type == "mistral" and listed not in (None, derived):
    raise ValueError(
      f"{source} has layer_types = {listed!r:.200}; a Mistral has its "
      "sliding_window in all layers or in none"
    )
  if not any(sliding):
    return ()
  if window is None:
    used = config.get("use_sliding_window", True)
    reason = "no sliding_window" if used else f"use_sliding_window = {used}"
    raise ValueError(f"{source} has layers with {SLIDING} and {reason}")
  return tuple(window if slides else None for slides in sliding)


def render(config: TransformerConfig) -> dict[str, Any]:
  """Returns a config.json that `parse` converts back to `config`.

  Raises ValueError where no architecture has this combination of options.
  """
  if not any(config.windows):
    config = dataclasses.replace(config, windows=())
  if config.recurrence:  # of which files do not say what is kept of it
    usual = Recurrence.__dataclass_fields__["num_nodes"].default
    kept = dataclasses.replace(config.recurrence, num_nodes=usual)
    config = dataclasses.replace(config, recurrence=kept)
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
    "torch_dtype": config.dtype,
    **hf_rope.render(config),
  }
  keys = KEYS | architecture.keys
  rendered |= {theirs: getattr(config, ours) for ours, theirs in keys.items()}
  if config.mask_token is None:  # as in configs of models that are no drafts
    del rendered["pard_token"]
  for option in architecture.only.keys() & {"hidden_act", "hidden_activation"}:
    rendered[option] = architecture.only[option][0]
  if "rope_parameters" in architecture.absent and not config.rope_scaling:
    rendered["rope_parameters"] = {"rope_type": "default"}
  if architecture.model_type in ("phi3", "smollm3"):
    # Else transformers assumes one, and refuses vocabularies without it.
    rendered["pad_token_id"] = None
  window = max(filter(None, config.windows), default=None)
  if window or "sliding_window" in architecture.absent:
    rendered["sliding_window"] = window
  if "use_sliding_window" in architecture.absent:
    rendered["use_sliding_window"] = window is not None
  if "no_rope_layers" in architecture.absent:
    rendered["no_rope_layers"] = [
      int(i not in config.unrotated_layers) for i in range(config.num_layers)
    ]
  if architecture.has_chunks:
    rendered |= hf_llama4.render(config)
  if architecture.has_latent:
    rendered |= hf_deepseek.render(config)
  if architecture.recurrence:
    rendered |= hf_recurrence.render(config, architecture.recurrence)
  if architecture.layer_types:
    rendered["layer_types"] = [
      SLIDING if w else FULL for w in config.windows
    ] or [FULL] * config.num_layers
  return rendered
