"""Names of a published head's weights: paths in its parameters, tensor names.

Paths are joined by '/'. Every format has the same tensors in the same
orientation, [out, in], under names of its own, so one table a kind serves all.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from specdec.checkpoints import names, stored_names
from specdec.checkpoints.formats.files import Files
from specdec.drafters.heads.head_config import OF_LAYERS, HeadConfig
from specdec.models.config import TransformerConfig

# What may be a drafter's own or the target's, by option of HeadConfig.
OWN = {"embed": "embed_table/weight", "head": "head/weight"}
MASK = "mask_hidden"  # of a P-EAGLE, its path and its tensor's name


# A drafter reads streams between layers of the target. HeadConfig.features and
# speculators name the layer that one enters, others the one that it leaves.
def layers_entered(left: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the layers that streams enter, of those that they leave."""
  return tuple(i + 1 for i in left)


def layers_left(entered: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the layers that streams leave, of those that they enter."""
  return tuple(i - 1 for i in entered)


def default_layers(num_layers: int) -> tuple[int, ...]:
  """Returns the layers that EAGLE-3 reads unless its config names others."""
  return 2, num_layers // 2, num_layers - 3


def stack_name(tensor: names.Tensor) -> str:
  """Returns the name of a tensor, of experts that of their stack."""
  first, *rest = tensor.hugging_face
  return first.replace("experts.0.", "experts.") if rest else first


def taken_apart(files: Files, config: TransformerConfig, prefix: str) -> Files:
  """Returns files as if every tensor of one decoder layer stood alone.

  Matrices that hold several are cut (stored_names.fused), and experts become
  one stack, of the name of `stack_name`.

  Args:
    config: of a model of this layer alone.
    prefix: of the layer's names in the files.

  Raises:
    ValueError: a matrix of several, or an expert, is absent or misshapen.
  """
  shapes, stacks = dict(files.shapes), {}

  def name_in_file(name: str) -> str:
    return prefix + name.removeprefix("model.layers.0.")

  cuts = stored_names.split(shapes, config, files.source, name_in_file)
  for tensor in names.tensors(config):
    each = [name_in_file(x) for x in tensor.hugging_face]
    if len(each) == 1:
      continue
    names.check(
      dict.fromkeys(each, tensor.shape[1:]),
      {x: shapes.pop(x) for x in each if x in shapes},
      files.source,
    )
    name = name_in_file(stack_name(tensor))
    shapes[name] = tensor.shape
    stacks[name] = each

  def read(name: str) -> np.ndarray:
    if name in stacks:
      return np.stack([files.read(x) for x in stacks[name]])
    whole, rows = cuts.get(name, (name, slice(None)))
    return files.read(whole)[rows]

  return files._replace(shapes=shapes, read=read)


def layers(head_config: HeadConfig, prefix: str) -> dict[str, str]:
  """Returns path below the decoder layers -> tensor name.

  Args:
    prefix: of the tensor names, with {} for the number of a layer.
  """
  table = {}
  for tensor in names.tensors(head_config.layers):
    layer = re.match(r"layer_(\d+)/", tensor.path)
    if layer is None:
      continue
    name = stack_name(tensor).removeprefix(f"model.layers.{layer[1]}.")
    table[tensor.path] = prefix.format(layer[1]) + name
  return table


def eagle(head_config: HeadConfig) -> dict[str, str]:
  """Returns path -> tensor name of an EAGLE 1, 2 or 3, or a P-EAGLE."""
  table = {}
  for path, name in layers(head_config, "layers.{}.").items():
    table[path if path.startswith("layer_0/") else f"blocks/{path}"] = name
  if head_config.embed == "own":
    table["embed_table/weight"] = "embed_tokens.weight"
  if head_config.kind == "eagle":
    del table["layer_0/attention_norm/scale"]
    table["fuse/weight"] = "fc.weight"
    if head_config.bias:
      table["fuse/bias"] = "fc.bias"
    return table
  if head_config.parallel:
    table[MASK] = MASK
  table["gather/weight"] = "fc.weight"
  table["layer_0/hidden_norm/scale"] = "layers.0.hidden_norm.weight"
  table["norm/scale"] = "norm.weight"
  if head_config.head == "own":
    table["head/weight"] = "lm_head.weight"
  if head_config.feature_norm == "joint":
    table["stream_norms_0/scale"] = "input_norm.weight"
  elif head_config.feature_norm == "each":
    for i in range(len(head_config.features)):
      table[f"stream_norms_{i}/scale"] = f"fc_norm.{i}.weight"
  return table


def check_mask(head_config: HeadConfig, place: str) -> None:
  """Refuses a P-EAGLE whose masks are no token of the target.

  Args:
    place: where it is read from, or the layout that it is written in.
  """
  if head_config.parallel and head_config.mask_token < 0:
    raise ValueError(
      f"{place}: mask_token = {head_config.mask_token}; masks of a published "
      "P-EAGLE are a token of the target, >= 0"
    )


def mtp(
  head_config: HeadConfig, prefix: str, outside: Mapping[str, str]
) -> dict[str, str]:
  """Returns path -> tensor name of an MTP layer.

  Args:
    prefix: of the tensor names of its decoder layers, as in `layers`.
    outside: path -> tensor name of all else; embedding and head only if they
      are the drafter's own.
  """
  table = {
    f"blocks/{path}": name for path, name in layers(head_config, prefix).items()
  }
  for path, name in outside.items():
    owners = [x for x in OWN if OWN[x] == path]
    if all(getattr(head_config, x) == "own" for x in owners):
      table[path] = name
  return table


def medusa(head_config: HeadConfig) -> dict[str, str]:
  """Returns path -> tensor name of Medusa's heads."""
  table, blocks = {}, head_config.residual_layers
  for head in range(head_config.levels):
    for i in range(blocks):
      for end in ("weight", "bias"):
        table[f"residual_{head}_{i}/{end}"] = f"{head}.{i}.linear.{end}"
    table[f"heads_{head}/weight"] = f"{head}.{blocks}.weight"
  return table


# Fields that HeadConfig and the config of a decoder share.
_SHARED = *OF_LAYERS, "num_layers"


def decoder_fields(config: TransformerConfig) -> dict:
  """Returns the fields of HeadConfig that a decoder's config decides on.

  Raises:
    ValueError: the decoder has options that a head's layers do not have.
  """
  fields, differing = _of_decoder(config)
  if differing:
    raise ValueError(
      f"its layers have {', '.join(differing)}; those of draft heads do not"
    )
  return fields


def mtp_fields(config: TransformerConfig) -> dict:
  """Returns those fields of an MTP layer, which may be any decoder layer."""
  fields, differing = _of_decoder(config)
  if differing:
    fields["layer"] = dataclasses.replace(
      config, vocab_size=1, tied=False, dtype="float32"
    )
  return fields


def _of_decoder(config: TransformerConfig) -> tuple[dict, list[str]]:
  """Returns the shared fields, and what the others differ in."""
  fields = {name: getattr(config, name) for name in _SHARED}
  free = {"kind": "mtp", "layout": "published", "num_layers": config.num_layers}
  layers = HeadConfig(**fields | free).layers
  differing = [
    f"{field.name} = {getattr(config, field.name)!r:.60}"
    for field in dataclasses.fields(config)
    if field.name not in ("vocab_size", "tied", "dtype", *_SHARED)
    and getattr(config, field.name) != getattr(layers, field.name)
  ]
  return fields, differing
