"""Where files hold the tensors of names.py: under other names, or in one."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.checkpoints import names
from specdec.checkpoints.architectures import WITH_IMAGES
from specdec.models.config import TransformerConfig
from specdec.models.parts import GATED_DELTA

# Of a model that also sees images: what it sees them with, and the beginnings
# of the text model's names, as files before and since transformers 4.52 have
# them.
_IMAGES = re.compile(
  r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*"
)
_TEXT = {
  "language_model.model.": "model.",
  "language_model.lm_head.": "lm_head.",
  "model.language_model.": "model.",
}


# Matrix of several, one below the other -> these.
_FUSED = {
  "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
  "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


class Part(NamedTuple):
  """A tensor that a file holds as rows of a larger one."""

  tensor: names.Tensor
  rows: np.ndarray


def fused(config: TransformerConfig) -> dict[str, list[Part]]:
  """Returns name in the file -> the tensors that it holds, every row once."""
  ours = {tensor.hugging_face[0]: tensor for tensor in names.tensors(config)}
  held: dict[str, list[Part]] = {}
  for i in range(config.num_layers):
    prefix = f"model.layers.{i}."
    for whole, groups, parts in _wholes(config, i):
      tensors = [ours.get(prefix + part) for part in parts]
      if None not in tensors:
        held[prefix + whole] = _in_groups(groups, tensors)
  return held


def split(
  shapes: dict[str, tuple[int, ...]],
  config: TransformerConfig,
  source: str,
  rename: Callable[[str], str] = str,
) -> dict[str, tuple[str, np.ndarray]]:
  """Replaces, in `shapes`, matrices that hold several by these.

  Args:
    rename: converts names of `config` to those of the file.

  Returns:
    Name -> the matrix that holds it, and its rows there.

  Raises:
    ValueError: a matrix is absent or has other rows.
  """
  held = {}
  for whole, parts in fused(config).items():
    whole, total = rename(whole), sum(len(part.rows) for part in parts)
    if whole not in shapes:
      raise ValueError(f"{source} lacks {whole}")
    rows, *rest = shapes.pop(whole)
    if rows != total:
      raise ValueError(f"{whole} has {rows} rows; the config requires {total}")
    for tensor, part_rows in parts:
      name = rename(tensor.hugging_face[0])
      shapes[name] = len(part_rows), *rest
      held[name] = whole, part_rows
  return held


class Stacked(NamedTuple):
  """A tensor of all experts that lies in a larger one, [E, in, out].

  Its own matrices are [out, in]; biases are [E, out] in both.
  """

  whole: str
  columns: slice  # which of the outputs


def stacked(config: TransformerConfig) -> dict[str, Stacked]:
  """Returns name of a tensor -> where files hold it, of stacked experts."""
  held = {}
  if config.expert_biases:
    room = "mlp"
    columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
  elif config.route_inputs:
    room, middle = "feed_forward", config.mlp_width
    columns = {"gate": slice(0, middle), "up": slice(middle, None)}
  else:
    return {}
  for i in {*range(config.num_layers)} - {*config.dense_layers}:
    prefix = f"model.layers.{i}.{room}.experts."
    for name in ("gate", "up", "down"):
      whole = prefix + ("down_proj" if name == "down" else "gate_up_proj")
      part = columns.get(name, slice(None))
      held[f"{prefix}{name}_proj.weight"] = Stacked(whole, part)
      if config.expert_biases:
        held[f"{prefix}{name}_proj.bias"] = Stacked(f"{whole}_bias", part)
  return held


def _wholes(
  config: TransformerConfig, layer: int
) -> Iterator[tuple[str, int, list[str]]]:
  """Yields tensors of a layer that hold several: (name, groups, parts).

  Names are below the layer. The rows of each part are in so many groups: the
  first group of every part comes first, then the second of every part.
  """
  if config.fused:
    for whole, parts in _FUSED.items():
      room = whole.partition(".")[0]
      yield f"{whole}.weight", 1, [f"{room}.{part}.weight" for part in parts]
  if not config.is_recurrent(layer):
    if config.latent:
      parts = [f"self_attn.{name}_b_proj.weight" for name in "kv"]
      yield "self_attn.kv_b_proj.weight", config.num_heads, parts
    if config.attention_gate:
      parts = ["self_attn.q_proj.weight", "self_attn.gate_proj.weight"]
      yield parts[0], config.num_heads, parts
    return
  r = config.recurrence
  room, is_delta = names.RECURRENT[r.kind], r.kind == GATED_DELTA

  def named(order: str, name: str) -> list[str]:
    return [f"{room}.{part}_{name}" for part in order]

  groups = r.num_key_heads if is_delta else 1
  for parts in ("qkvz", "ba") if is_delta else ("zvkqa",):
    end = f"_{parts}" if is_delta else ""
    whole = f"{room}.in_proj{end}.weight"
    yield whole, groups, named(parts, "proj.weight")
  order = "qkv" if is_delta else "vkq"
  for end in ("weight", "bias") if r.conv_bias else ("weight",):
    yield f"{room}.conv1d.{end}", 1, named(order, f"conv1d.{end}")


def _in_groups(groups: int, tensors: Sequence[names.Tensor]) -> list[Part]:
  """Returns the rows of tensors, as `_wholes` says."""
  sizes = [tensor.shape[0] // groups for tensor in tensors]
  rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
  starts = np.cumsum([0, *sizes])
  return [
    Part(tensor, rows[:, start : start + size].ravel())
    for tensor, start, size in zip(tensors, starts, sizes)
  ]


def in_file(config: TransformerConfig) -> dict[str, str]:
  """Returns path of a parameter -> its name in the file, of a first expert."""
  wholes = {
    part.tensor.path: whole
    for whole, parts in fused(config).items()
    for part in parts
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
