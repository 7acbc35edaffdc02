"""The layout of vLLM's `speculators`, from which vLLM serves EAGLE-3 heads.

Keys and tensors are those of versions 0.5 to 0.9 of the package, which also
trains and loads P-EAGLE, and MTP layers of Qwen 3; vLLM 0.32 does not read the
latter. Its block drafters are in speculators_blocks.py.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import blocks, speculators_blocks, tables
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import (
  Stored,
  Target,
  layer_ids,
  typed,
)
from specdec.drafters.heads.head_config import HeadConfig
from specdec.utils.spelling import check_choice, join_names

NAME = "speculators"
VERSION = "0.9.0"  # whose keys are written
_TYPE = "speculators_model_type"
KINDS = "eagle3", "peagle", "mtp", *speculators_blocks.ARCHITECTURES
_OURS = "eagle3", "peagle", "mtp", "block"  # kinds of heads
_ARCHITECTURES = {
  "eagle3": "Eagle3Speculator",
  "peagle": "PEagleSpeculator",
  "mtp": "MTPDraftModel",
  **speculators_blocks.ARCHITECTURES,
}
_MTP = {
  "fuse/weight": "mtp_layers.0.input_proj.weight",
  "embed_norm/scale": "mtp_layers.0.token_layernorm.weight",
  "hidden_norm/scale": "mtp_layers.0.hidden_layernorm.weight",
  "norm/scale": "mtp_layers.0.final_layernorm.weight",
}
# Architecture of a layer's model_type, and what transformers leaves out of a
# config as its defaults.
_LAYERS = {
  "llama": (
    "LlamaForCausalLM",
    {"intermediate_size": 11008, "vocab_size": 32000},
  ),
  "qwen3": (
    "Qwen3ForCausalLM",
    {"intermediate_size": 22016, "vocab_size": 151_936},
  ),
}
_SIZES = {
  "hidden_size": 4096,
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "rms_norm_eps": 1e-6,
}


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return _TYPE in files.config


def _layer(config: Mapping[str, Any], source: str) -> dict[str, Any]:
  """Returns transformer_layer_config with what transformers leaves out."""
  layer = typed(config, "transformer_layer_config", dict, source)
  model_type = layer.get("model_type", "qwen3")
  check_choice(
    f"{source}: model_type", model_type, _LAYERS, " is not supported; supported"
  )
  architecture, defaults = _LAYERS[model_type]
  return _SIZES | defaults | layer | {"architectures": [architecture]}


def _decoder(config: Mapping[str, Any], source: str, **changes) -> dict:
  """Returns the fields of a HeadConfig from transformer_layer_config."""
  layer = _layer(config, source) | changes
  parsed = hf_config.parse(layer, source, "float32")
  return tables.decoder_fields(parsed) | {"vocab_size": parsed.vocab_size}


def _levels(config: Mapping[str, Any], source: str) -> int:
  inner = typed(config, "speculators_config", dict, source)
  methods = typed(inner, "proposal_methods", list, source)
  if not methods or not isinstance(methods[0], dict):
    raise ValueError(f"{source} has no proposal_methods")
  return typed(methods[0], "speculative_tokens", int, source)


def verifier(config: Mapping[str, Any]) -> str | None:
  """Returns the name of the target that a config was written for."""
  inner = config.get("speculators_config")
  inner = inner.get("verifier") if isinstance(inner, dict) else None
  name = inner.get("name_or_path") if isinstance(inner, dict) else None
  return name if isinstance(name, str) else None


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  config, source = files.config, files.source
  kind = config[_TYPE]
  if kind == "eagle":
    raise ValueError(
      f"{source} is of speculators' type 'eagle', which versions up to 0.4 "
      "wrote; convert the original checkpoint instead: EAGLE 1 and 2 load as "
      "their authors publish them"
    )
  check_choice(f"{source}: {_TYPE}", kind, KINDS, " does not load; known")
  if kind in speculators_blocks.ARCHITECTURES:
    stored = speculators_blocks.parse(
      files, target, kind, _layer(config, source)
    )
    return stored._replace(verifier=verifier(config))
  common = dict(kind=kind, layout="published", levels=_levels(config, source))
  if kind == "mtp":
    if config.get("num_nextn_predict_layers", 1) != 1:
      raise ValueError(f"{source}: num_nextn_predict_layers must be 1")
    fields = _decoder(config, source, num_hidden_layers=1, layer_types=None)
    vocab_size = fields.pop("vocab_size")
    head_config = HeadConfig(
      head="shared", feeds_back_norm=True, **common, **fields
    )
    table = tables.mtp(head_config, "mtp_layers.0.", _MTP)
    return Stored(head_config, table, vocab_size, verifier(config))
  fields = _decoder(config, source)
  vocab_size = fields.pop("vocab_size")
  if "norm_before_residual" not in config:
    raise ValueError(
      f"{source} does not say norm_before_residual, of which readers have "
      "different defaults; add it to config.json as the drafter was trained"
    )
  features = config.get("eagle_aux_hidden_state_layer_ids")
  if features:
    features = layer_ids(features, source)
  else:
    features = tables.default_layers(target.num_layers) if target else (0,) * 3
  norms = [
    typed(config, name, bool, source, False)
    for name in ("norm_before_fc", "fc_norm")
  ]
  if all(norms):
    raise ValueError(f"{source} has both norm_before_fc and fc_norm")
  size = typed(config, "draft_vocab_size", int, source, 32000)
  if kind == "peagle":
    fields["mask_token"] = typed(config, "mask_token_id", int, source)
  head_config = HeadConfig(
    features=features,
    vocabulary=0 if size == vocab_size else size,
    embed="own" if "embed_tokens.weight" in files.shapes else "shared",
    head="own" if "lm_head.weight" in files.shapes else "shared",
    feature_norm="joint" if norms[0] else "each" if norms[1] else "none",
    norm_before_residual=typed(config, "norm_before_residual", bool, source),
    feeds_back_norm=typed(config, "norm_output", bool, source, False),
    **common,
    **fields,
  )
  tables.check_mask(head_config, source)
  return Stored(
    head_config,
    tables.eagle(head_config),
    vocab_size,
    verifier(config),
    typed(config, "target_hidden_size", int, source, None) or head_config.width,
  )


def _check_written(head_config: HeadConfig) -> None:
  """Refuses a head that the package's readers would not load as it is."""
  check_choice(
    "kind", head_config.kind, _OURS, f" cannot be written as {NAME}; known"
  )
  if head_config.block:
    return speculators_blocks.check_written(head_config, NAME)
  if head_config.kind in ("eagle3", "peagle"):
    tables.check_mask(head_config, NAME)
    if len({*head_config.features}) < len(head_config.features):
      raise ValueError(
        f"features = {head_config.features}: {NAME} wants different layers"
      )
    return
  wanted = {
    "num_layers": 1,
    "vocabulary": 0,
    "head": "shared",
    "embed": "shared",
    "feeds_back_norm": True,
    "hidden_first": False,
    "norm_offset": False,
    "qk_norm": True,  # the layers of Qwen 3
    "qkv_bias": False,
  }
  for name, value in wanted.items():
    if getattr(head_config, name) != value:
      raise ValueError(
        f"{name} = {getattr(head_config, name)!r}: {NAME} knows MTP with "
        f"{name} = {value!r} only"
      )


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config.json of a head, as `parse` reads it.

  Raises:
    ValueError: the layout has no place for one of its options.
  """
  _check_written(head_config)
  kind = head_config.kind
  if head_config.block:
    kind = blocks.kind_of(head_config.block)
    layer = blocks.render_layers(head_config)
  else:
    layer = hf_config.render(head_config.layers)
  model_type = layer["model_type"]
  if model_type not in _LAYERS:
    raise ValueError(
      f"layers of {model_type} cannot be written as {NAME}; known: "
      f"{join_names(_LAYERS)}"
    )
  del layer["architectures"], layer["torch_dtype"]
  layer |= {"vocab_size": target.vocab_size, "hidden_act": "silu"}
  layer |= {"attention_bias": False, "tie_word_embeddings": False}
  if target.max_length:
    layer["max_position_embeddings"] = target.max_length
  proposal = {
    "proposal_type": "greedy",
    "speculative_tokens": head_config.levels,
    "verifier_accept_k": 1,
    "accept_tolerance": 0.0,
  }
  config = {
    "architectures": [_ARCHITECTURES[kind]],
    _TYPE: kind,
    "speculators_version": VERSION,
    "speculators_config": {
      "algorithm": kind,
      "default_proposal_method": "greedy",
      "proposal_methods": [proposal],
      "verifier": {
        "name_or_path": target.name,
        "architectures": list(target.architectures),
      },
    },
    "transformer_layer_config": layer,
    "tie_word_embeddings": False,
    "dtype": dtype,
  }
  if head_config.block:
    return config | speculators_blocks.render(head_config, target)
  if head_config.kind == "mtp":
    layer["num_hidden_layers"] = target.num_layers
    return config | {"num_nextn_predict_layers": 1}
  if head_config.parallel:
    config["mask_token_id"] = head_config.mask_token
  return config | {
    "draft_vocab_size": head_config.vocabulary or target.vocab_size,
    "norm_before_residual": head_config.norm_before_residual,
    "target_hidden_size": target.width,
    "eagle_aux_hidden_state_layer_ids": list(head_config.features),
    "norm_before_fc": head_config.feature_norm == "joint",
    "fc_norm": head_config.feature_norm == "each",
    "norm_output": head_config.feeds_back_norm,
    "embed_requires_grad": head_config.parallel,
  }


def table(head_config: HeadConfig) -> dict[str, str]:
  """Returns path -> tensor name, for writing."""
  if head_config.block:
    return blocks.table(head_config)
  if head_config.kind == "mtp":
    return tables.mtp(head_config, "mtp_layers.0.", _MTP)
  return tables.eagle(head_config)
