"""Where files hold the tensors of names.py: under other names, or in one."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from specdec.checkpoints import names
from specdec.checkpoints.architectures import WITH_IMAGES
from specdec.models.config import TransformerConfig

# Of a model that also sees images: what it sees them with, and the beginnings
# of the text model's names, as files before and since transformers 4.52 have
# them.
_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_TEXT = {
  "language_model.model.": "model.",
  "language_model.lm_head.": "lm_head.",
  "model.language_model.": "model.",
}


# Matrix of several, one below the other -> these.
_FUSED = {
  "qkv_proj": ("q_proj", "k_proj", "v_proj"),
  "gate_up_proj": ("gate_proj", "up_proj"),
}


def fused(config: TransformerConfig) -> dict[str, list[names.Tensor]]:
  """Returns name in the file -> the tensors that it holds, from the top on."""
  held: dict[str, list[names.Tensor]] = {}
  for tensor in names.tensors(config) if config.fused else ():
    [name] = tensor.hugging_face
    for whole, parts in _FUSED.items():
      for part in parts:
        if f".{part}." in name:
          held.setdefault(name.replace(part, whole), []).append(tensor)
  return held


def in_file(config: TransformerConfig) -> dict[str, str]:
  """Returns path of a parameter -> its name in the file, of a first expert."""
  wholes = {
    tensor.path: whole
    for whole, parts in fused(config).items()
    for tensor in parts
  }
  return {
    tensor.path: wholes.get(tensor.path, tensor.hugging_face[0])
    for tensor in names.tensors(config)
  }


def text_names(
  stored_names: Iterable[str], architectures: Iterable[str]
) -> dict[str, str]:
  """Returns name in names.py -> name in the file, without what sees images."""
  if WITH_IMAGES.keys().isdisjoint(architectures):
    return {name: name for name in stored_names}
  found = {}
  for stored in stored_names:
    if _IMAGES.fullmatch(stored):
      continue
    name = stored
    for prefix, ours in _TEXT.items():
      if stored.startswith(prefix):
        name = ours + stored.removeprefix(prefix)
    found[name] = stored
  return found


def without_mtp(
  stored_names: Iterable[str], config: Mapping[str, Any]
) -> list[str]:
  """Returns names without those of MTP layers, which are drafters.

  Args:
    config: the decoded config.json that goes with them.
  """
  count = config.get("num_hidden_layers")
  more = config.get("num_nextn_predict_layers") or 0
  prefixes = ["mtp.", "model.mtp_layers."]
  if type(count) is type(more) is int:
    layers = range(count, count + min(more, 64))
    prefixes += [f"model.layers.{i}." for i in layers]
  return [x for x in stored_names if not x.startswith(tuple(prefixes))]
