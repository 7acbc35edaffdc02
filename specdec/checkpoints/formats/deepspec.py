"""DSpark and DFlash as DeepSpec publishes them (deepseek-ai/DeepSpec,
deepspec/modeling/dspark/qwen3).

One architecture for both: all keys are at the top level, every slot predicts
the token after it, and layer -1 stands for the embeddings. Its DFlash is the
same without a Markov and a confidence head. Its files also hold the target's
embedding and vocabulary projection: learned.py leaves out what is a copy, and
conversion.py writes it again.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import blocks
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target, typed
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.utils.spelling import check_choice

NAME = "deepspec"
HOLDS_COPIES = True
_ARCHITECTURE = "Qwen3DSparkModel"
_LOWEST = -1  # of target_layer_ids


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  return _ARCHITECTURE in hf_config.architectures(files.config)


def heads(
  config: Mapping[str, Any], source: str, *rank: int, confident: bool = False
) -> dict[str, Any]:
  """Returns the fields of BlockConfig of the Markov and confidence heads.

  Args:
    rank: of the Markov head where the config has none; () refuses that.
    confident: whether there is a confidence head, which reads W1[token], where
      the config does not say.

  Raises:
    ValueError: a combination of them is not implemented.
  """
  rank = typed(config, "markov_rank", int, source, *rank)
  kind = typed(config, "markov_head_type", str, source, "vanilla")
  confidence, reads = (
    typed(config, key, bool, source, confident)
    for key in ("enable_confidence_head", "confidence_head_with_markov")
  )
  fields: dict[str, Any] = {"confidence": confidence}
  if rank:
    check_choice(f"{source}: markov_head_type", kind, blocks.MARKOV)
    fields |= {"successor": blocks.MARKOV[kind], "rank": rank}
  if confidence and reads != bool(rank):
    raise ValueError(
      f"{source} has confidence_head_with_markov = {reads} with markov_rank = "
      f"{rank}; a confidence head reads the Markov head where there is one"
    )
  return fields


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  config, source = files.config, files.source
  fields, windows, vocab_size = blocks.decoder(config, source)
  if any(windows):
    raise ValueError(
      f"{source} has layers with a sliding window, which {NAME} does not have"
    )
  count = typed(config, "num_target_layers", int, source, None)
  blocks.check_target(None, count, target, source)
  size = typed(config, "draft_vocab_size", int, source, vocab_size)
  head_config = HeadConfig(
    kind="block",
    layout="published",
    levels=typed(config, "block_size", int, source),
    vocabulary=0 if size == vocab_size else size,
    features=blocks.features_of(
      config.get(blocks.LAYER_IDS), _LOWEST, source, target
    ),
    block=BlockConfig(
      slots="next",
      mask_token=typed(config, "mask_token_id", int, source),
      **heads(config, source),
    ),
    **blocks.owned(files.shapes),
    **fields,
  )
  return Stored(head_config, blocks.table(head_config), vocab_size)


def render_heads(head_config: HeadConfig) -> dict[str, Any]:
  """Returns the keys of the Markov and confidence heads, as `heads` reads."""
  block = head_config.block
  kinds = {ours: theirs for theirs, ours in blocks.MARKOV.items()}
  markov = block.successor in kinds
  return {
    "markov_rank": block.rank if markov else 0,
    "markov_head_type": kinds.get(block.successor, "vanilla"),
    "enable_confidence_head": block.confidence,
    "confidence_head_with_markov": block.confidence and markov,
  }


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config.json of a head, as `parse` reads it.

  Raises:
    ValueError: the layout has no place for one of its options.
  """
  wanted = {
    "kind": ("block",),
    "block.slots": ("next",),
    "block.successor": ("none", *blocks.MARKOV.values()),
    "block.causal": (False,),
    "block.window": (0,),
    "vocabulary": (0,),
  }
  blocks.check_written(head_config, NAME, wanted)
  left = blocks.layers_left(head_config, _LOWEST, NAME, target)
  if left != sorted({*left}):
    raise ValueError(
      f"features = {head_config.features}: {NAME} wants ascending layers"
    )
  return (
    blocks.render(head_config, target, dtype)
    | render_heads(head_config)
    | {
      "architectures": [_ARCHITECTURE],
      "num_target_layers": target.num_layers,
      "num_anchors": 512,  # of training, which its reader wants to be told
      blocks.LAYER_IDS: left,
    }
  )


table = blocks.table
