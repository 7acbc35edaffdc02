"""EAGLE 1, 2 and 3 as SafeAILab, SpecForge and ModelOpt publish them.

P-EAGLE is an EAGLE-3 with `mask_hidden` and a token for masks, under one of the
names that vLLM reads (vllm/v1/spec_decode/llm_base_proposer.py at 00c4f22).
"""

from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import tables
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import (
  Stored,
  Target,
  layer_ids,
  typed,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.utils.spelling import check_choice

NAME = "eagle"
KINDS = "eagle", "eagle3", "peagle"
_FIRST, _MIDDLE = "layers.0.", "midlayer."
_SPECFORGE = "LlamaForCausalLMEagle3"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MASK_TOKENS = "ptd_token_id", "pard_token", "mask_token_id"
_ONLY = {  # options of eagle_config -> what this EAGLE-3 is
  "use_aux_hidden_state": True,
  "use_input_layernorm_in_first_layer": True,
  "use_last_layernorm": True,
  "use_mtp_layernorm": False,
  "parallel_draft_step": 1,
}


def _is_eagle3(files: Files) -> bool:
  config = files.config
  return (
    config.get("draft_vocab_size") is not None
    or tables.MASK in files.shapes
    or _SPECFORGE in hf_config.architectures(config)
    or any(name.startswith(_MIDDLE) for name in files.shapes)
  )


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  has = files.shapes.__contains__
  first = any(
    has(f"{layer}self_attn.q_proj.weight") for layer in (_FIRST, _MIDDLE)
  )
  return first and has("fc.weight")


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  config, source, shapes = files.config, files.source, files.shapes
  masks = {x: config[x] for x in _MASK_TOKENS if config.get(x) is not None}
  layer = {key: x for key, x in config.items() if key not in _MASK_TOKENS}
  layer["architectures"] = ["LlamaForCausalLM"]
  parsed = hf_config.parse(layer, source, "float32")
  fields = tables.decoder_fields(parsed) | {"layout": "published"}
  embed = "own" if "embed_tokens.weight" in shapes else "shared"
  if not _is_eagle3(files):
    # Their embedding is a copy of the target's.
    head_config = HeadConfig(
      kind="eagle",
      head="shared",
      embed=embed,
      bias=typed(config, "bias", bool, source, True),
      **fields,
    )
    names = tables.eagle(head_config)
    return Stored(head_config, names, parsed.vocab_size)
  extra = typed(config, "eagle_config", dict, source, {})
  for key, value in _ONLY.items():
    if extra.get(key, value) != value:
      raise ValueError(
        f"{source} has {key} = {extra[key]!r:.60} in eagle_config; accepted: "
        f"{value!r}"
      )
  features = _features(config, extra, target, source)
  size = typed(config, "draft_vocab_size", int, source, parsed.vocab_size)
  if size != parsed.vocab_size and "lm_head.weight" not in shapes:
    raise ValueError(
      f"{source} drafts {size} of {parsed.vocab_size} tokens and lacks "
      "lm_head.weight"
    )
  is_parallel = bool(masks) or tables.MASK in shapes
  head_config = HeadConfig(
    kind="peagle" if is_parallel else "eagle3",
    mask_token=_mask_token(masks, source) if is_parallel else -1,
    features=features,
    vocabulary=0 if size == parsed.vocab_size else size,
    embed=embed,
    head="own" if "lm_head.weight" in shapes else "shared",
    feature_norm=_feature_norm(config, extra, source),
    norm_before_residual=typed(
      config, "norm_before_residual", bool, source, False
    ),
    feeds_back_norm=typed(config, "norm_output", bool, source, False),
    **fields,
  )
  tables.check_mask(head_config, source)
  names = tables.eagle(head_config)
  if any(name.startswith(_MIDDLE) for name in shapes):
    names = _midlayer(names)
  width = typed(config, "target_hidden_size", int, source, head_config.width)
  return Stored(head_config, names, parsed.vocab_size, None, width)


def _features(config, extra, target: Target | None, source: str):
  """Returns the streams that an EAGLE-3 reads, by the layers they enter.

  SGLang and SpecForge name the layers that they leave, in eagle_config; vLLM
  those that they enter, at the top level. An empty list stands for the paper's.
  """
  if config.get(_LAYERS):
    return layer_ids(config[_LAYERS], source)
  if extra.get(_LAYERS):
    return tables.layers_entered(layer_ids(extra[_LAYERS], source))
  return tables.default_layers(target.num_layers) if target else (0,) * 3


def _mask_token(named: dict[str, Any], source: str) -> int:
  """Returns HeadConfig.mask_token; raises ValueError where names differ."""
  values = [*named.values()]
  if not values or any(value != values[0] for value in values):
    raise ValueError(
      f"{source} names {named or 'no token'} for masks; give one as "
      f"{_MASK_TOKENS[0]}"
    )
  return typed(named, next(iter(named)), int, source)


def _feature_norm(config, extra, source: str) -> str:
  """Returns HeadConfig.feature_norm."""
  if typed(config, "fc_norm", bool, source, False):
    return "each"
  joint = extra.get("norm_before_fc", config.get("norm_before_fc"))
  return "joint" if joint else "none"


def _midlayer(names: dict[str, str]) -> dict[str, str]:
  return {
    path: name.replace(_FIRST, _MIDDLE) if name.startswith(_FIRST) else name
    for path, name in names.items()
  }


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config.json of a head, as `parse` reads it.

  Raises:
    ValueError: the layout has no place for one of its options.
  """
  check_choice(
    "kind", head_config.kind, KINDS, f" cannot be written as {NAME}; known"
  )
  if head_config.qk_norm:
    raise ValueError(
      f"{NAME} has no place for qk_norm; write it as speculators"
    )
  if head_config.kind == "eagle" and head_config.vocabulary:
    raise ValueError(
      f"vocabulary = {head_config.vocabulary}: {NAME} knows EAGLE 1 and 2 with "
      "the whole vocabulary, 0, only"
    )
  tables.check_mask(head_config, NAME)
  if 0 in head_config.features:
    raise ValueError(
      f"features = {head_config.features}: {NAME} names the layers that a "
      "stream leaves, and embeddings leave none; write it as speculators"
    )
  config = hf_config.render(head_config.layers)
  config |= {"vocab_size": target.vocab_size, "tie_word_embeddings": False}
  config["torch_dtype"] = dtype
  if target.max_length:
    config["max_position_embeddings"] = target.max_length
  if head_config.kind == "eagle":
    return config | {"bias": head_config.bias}
  if head_config.parallel:
    config[_MASK_TOKENS[0]] = head_config.mask_token
  return config | {
    "architectures": [_SPECFORGE],
    "draft_vocab_size": head_config.vocabulary or target.vocab_size,
    "target_hidden_size": target.width,
    _LAYERS: list(head_config.features),
    "eagle_config": {
      _LAYERS: list(tables.layers_left(head_config.features)),
      "use_aux_hidden_state": True,
      "norm_before_fc": head_config.feature_norm == "joint",
    },
    "norm_before_residual": head_config.norm_before_residual,
    "fc_norm": head_config.feature_norm == "each",
    "norm_output": head_config.feeds_back_norm,
  }


def table(head_config: HeadConfig) -> dict[str, str]:
  """Returns path -> tensor name, for writing."""
  names = tables.eagle(head_config)
  return _midlayer(names) if head_config.kind == "eagle3" else names
