"""MTP layers inside a model's own checkpoint, which transformers leaves out.

DeepSeek-V3 and GLM-4.5 keep them after the model's layers, Qwen3-Next below
`mtp.`, MiMo below `model.mtp_layers.`. A block is a decoder layer of the model:
with attention where others have a state, a mixture where first ones are dense.
"""

from typing import NamedTuple

from specdec.checkpoints import compressed, hf_config
from specdec.checkpoints.formats import tables
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target
from specdec.drafters.heads.head_config import HeadConfig

NAME = "native MTP"


class _Family(NamedTuple):
  """Names of tensors, {} for the number of the model's layers."""

  layers: str  # prefix of the block's
  outside: dict[str, str]
  options: dict  # of the HeadConfig


_FAMILIES = {
  "deepseek": _Family(
    "model.layers.{}.",
    {
      "fuse/weight": "eh_proj.weight",
      "embed_norm/scale": "enorm.weight",
      "hidden_norm/scale": "hnorm.weight",
      "norm/scale": "shared_head.norm.weight",
      "head/weight": "shared_head.head.weight",
      "embed_table/weight": "embed_tokens.weight",
    },
    {},
  ),
  "qwen": _Family(
    "mtp.",
    {
      "fuse/weight": "fc.weight",
      "embed_norm/scale": "pre_fc_norm_embedding.weight",
      "hidden_norm/scale": "pre_fc_norm_hidden.weight",
      "norm/scale": "norm.weight",
    },
    {"feeds_back_norm": True, "norm_offset": True},
  ),
  "mimo": _Family(
    "model.mtp_layers.0.",
    {
      "fuse/weight": "input_proj.weight",
      "embed_norm/scale": "token_layernorm.weight",
      "hidden_norm/scale": "hidden_layernorm.weight",
      "norm/scale": "final_layernorm.weight",
    },
    {"feeds_back_norm": True, "hidden_first": True},
  ),
}

# Of a model of this layer alone.
_ONE_LAYER = {
  "num_hidden_layers": 1,
  "layer_types": None,
  "full_attention_interval": 1,
  "first_k_dense_replace": 0,
}


def _family(files: Files) -> tuple[str, str] | None:
  """Returns the family of a checkpoint and the prefix of its MTP layer."""
  count = files.config.get("num_hidden_layers")
  for name, family in _FAMILIES.items():
    prefix = family.layers.format(count)
    if prefix + family.outside["fuse/weight"] in files.shapes:
      return name, prefix
  return None


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return _family(files) is not None


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  del target
  name, prefix = _family(files)
  family, source = _FAMILIES[name], files.source
  config = files.config | _ONE_LAYER
  config.pop(compressed.KEY, None)
  parsed = hf_config.parse(config, source, "float32")
  outside = {path: prefix + x for path, x in family.outside.items()}
  own = {
    key: "own" if outside.get(path) in files.shapes else "shared"
    for key, path in tables.OWN.items()
  }
  fields = tables.mtp_fields(parsed) | own | family.options
  head_config = HeadConfig(kind="mtp", layout="published", levels=1, **fields)
  block = f"{prefix}layers.0." if name == "qwen" else prefix
  table = tables.mtp(head_config, block, outside)
  alone = tables.taken_apart(files, head_config.layers, block)
  return Stored(
    head_config, table, parsed.vocab_size, prefix=prefix, files=alone
  )
