"""Medusa's heads as their authors publish them: medusa_lm_head."""

import re
from typing import Any

from specdec.checkpoints.formats import tables
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target
from specdec.drafters.heads.head_config import HeadConfig
from specdec.utils.spelling import check_choice

NAME = "medusa"
FILE = "medusa_lm_head.safetensors"
KINDS = ("medusa",)


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return "medusa_num_heads" in files.config


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown.

  Heads and blocks are counted from the tensors: uploaded configs give numbers
  that the code they came with did not use.
  """
  del target
  shapes, source = files.shapes, files.source
  if any(re.match(r"(blocks|lm_heads?)\.", name) for name in shapes):
    raise ValueError(
      f"{source} is Medusa with vLLM's names; give the original "
      "medusa_lm_head.safetensors or medusa_lm_head.pt"
    )
  places = [
    re.fullmatch(r"([0-9]{1,4})\.([0-9]{1,4})\.linear\.weight", x)
    for x in shapes
  ]
  places = [(int(x[1]), int(x[2])) for x in places if x]
  if not places:
    raise ValueError(f"{source} holds no residual block of a Medusa head")
  heads, blocks = (max(numbers) + 1 for numbers in zip(*places))
  projection = shapes.get(f"0.{blocks}.weight", (0, 0))
  if "0.0.linear.weight" not in shapes:
    raise ValueError(f"{source} lacks 0.0.linear.weight")
  width = shapes["0.0.linear.weight"][0]
  head_config = HeadConfig(
    kind="medusa",
    layout="published",
    num_layers=0,
    width=width,
    levels=heads,
    residual_layers=blocks,
  )
  # Where the shape is wrong, the error is to name the tensor, not the target.
  vocab_size = projection[0] if projection[1:] == (width,) else None
  table = tables.medusa(head_config)
  return Stored(head_config, table, vocab_size)


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config.json of heads, as `parse` reads it.

  Raises:
    ValueError: they draft from a smaller vocabulary, or share a projection.
  """
  check_choice(
    "kind", head_config.kind, KINDS, f" cannot be written as {NAME}; known"
  )
  if head_config.vocabulary or head_config.head == "shared":
    raise ValueError(
      f"{NAME} knows heads with projections of their own to the whole "
      "vocabulary only"
    )
  return {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "medusa_num_heads": head_config.levels,
    "medusa_num_layers": head_config.residual_layers,
    "hidden_size": head_config.width,
    "vocab_size": target.vocab_size,
    "torch_dtype": dtype,
    "base_model_name_or_path": target.name,
  }


table = tables.medusa  # path -> tensor name, for writing
