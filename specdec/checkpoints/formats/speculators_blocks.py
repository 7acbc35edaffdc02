"""Block drafters of vLLM's `speculators`: types dflash, dflash2 and dspark.

As version 0.9.0 of the package (speculators/models/dflash, dflash2 and dspark)
trains and saves them: without an embedding, and with a vocabulary projection
only where it drafts fewer tokens than the target has. Older versions saved both
always. Layers are counted by the stream that enters them.

The package trains layers with a window on the positions before the anchor, for
all slots alike; here, as in z-lab's code, every slot counts from itself, and
slot j sees j + 1 positions of context less.
"""

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import blocks, deepspec
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import (
  Stored,
  Target,
  layer_ids,
  typed,
)
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig

ARCHITECTURES = {
  "dflash": "DFlashDraftModel",
  "dflash2": "DFlash2DraftModel",
  "dspark": "DSparkDraftModel",
}
_DFLASH2 = {  # sizes where a config says none
  "conv_kernel_size": 2,
  "conv_group_size": 16,
  "selector_rank": 256,
  "selector_top_k": 16,
}
_LAYERS = "aux_hidden_state_layer_ids"


def parse(
  files: Files, target: Target | None, kind: str, layer: Mapping[str, Any]
) -> Stored:
  """Returns what a folder holds, but for its verifier.

  Args:
    kind: one of ARCHITECTURES.
    layer: the config of its layers, with the defaults of transformers.

  Raises:
    ValueError: that is unknown.
  """
  config, source = files.config, files.source
  projector = config.get("projector_type", "dflash")
  if projector != "dflash":
    raise ValueError(
      f"{source} has projector_type = {projector!r:.60}; accepted: 'dflash'"
    )
  [architecture] = hf_config.architectures(layer)
  options, windows, vocab_size = blocks.decoder(layer, source, architecture)
  listed = layer.get("layer_types") or []
  if "sliding_attention" in listed and not any(windows):
    raise ValueError(
      f"{source} has layers with sliding_attention of model_type "
      f"{layer.get('model_type')!r}; they load of 'qwen3'"
    )
  blocks.check_target(None, None, target, source)
  size = typed(config, "block_size", int, source, 8)
  is_next = typed(config, "sample_from_anchor", bool, source, kind == "dspark")
  heads = {}
  if kind == "dspark":
    heads = deepspec.heads(config, source, 256, confident=True)
  if kind == "dflash2" and is_next:
    raise ValueError(
      f"{source} is a DFlash2 with sample_from_anchor = True; accepted: False"
    )
  if heads.get("successor") == "rnn_markov" and not is_next:
    raise ValueError(
      f"{source} has markov_head_type = 'rnn' with sample_from_anchor = False, "
      "whose state begins a slot earlier; accepted: True"
    )
  non_causal = typed(
    config, "sliding_window_non_causal", bool, source, kind == "dflash2"
  )
  seen = blocks.seen(windows, False if non_causal else None, size, source)
  drafted = typed(config, "draft_vocab_size", int, source, 32000)
  if kind == "dflash2":
    if drafted != vocab_size:
      raise ValueError(
        f"{source} is a DFlash2 that drafts {drafted} of {vocab_size} tokens; "
        "its selector has all"
      )
    heads = blocks.parse_dflash2(
      lambda key: typed(config, key, int, source, _DFLASH2[key]),
      *(size, vocab_size, source),
    )
  own = blocks.owned(files.shapes)
  if drafted != vocab_size and own["head"] == "shared":
    raise ValueError(
      f"{source} drafts {drafted} of {vocab_size} tokens and lacks "
      "lm_head.weight"
    )
  levels = size if is_next else size - 1
  if levels < 1:
    raise ValueError(f"{source} has block_size = {size}, which drafts nothing")
  head_config = HeadConfig(
    kind="block",
    layout="published",
    levels=levels,
    vocabulary=0 if drafted == vocab_size else drafted,
    features=layer_ids(config.get(_LAYERS), source, 0, _LAYERS),
    block=BlockConfig(
      slots="next" if is_next else "in_place",
      mask_token=typed(config, "mask_token_id", int, source),
      **heads,
      **seen,
    ),
    **own,
    **options,
  )
  if target:
    blocks.check_last(head_config.features, target, source)
  width = typed(config, "target_hidden_size", int, source, None)
  table = blocks.table(head_config)
  return Stored(head_config, table, vocab_size, target_width=width)


def check_written(head_config: HeadConfig, layout: str) -> None:
  """Refuses a head that the package's readers would not load as it is."""
  block = head_config.block
  successors = "none", "selector", *blocks.MARKOV.values()
  wanted = {"block.successor": successors}
  # The package takes the target's where it drafts all tokens.
  wanted |= {"embed": ("shared",)}
  wanted |= {"head": ("own" if head_config.vocabulary else "shared",)}
  if block.causal and (block.full_layers or not block.window):
    wanted |= {"block.causal": (False,)}
  if block.successor == "rnn_markov":
    wanted |= {"block.slots": ("next",)}
  if block.successor == "selector":
    wanted |= {"block.confidence": (False,), "vocabulary": (0,)}
    wanted |= {"block.slots": ("in_place",)}
  blocks.check_written(head_config, layout, wanted)


def render(head_config: HeadConfig, target: Target) -> dict[str, Any]:
  """Returns the keys beyond those of every type."""
  block, features = head_config.block, head_config.features
  blocks.check_last(features, target, f"features = {features}: speculators")
  keys = {
    "draft_vocab_size": head_config.vocabulary or target.vocab_size,
    "block_size": head_config.block_size,
    "target_hidden_size": None,
    _LAYERS: list(features),
    "mask_token_id": block.mask_token,
    "sliding_window_non_causal": bool(
      block.window and not (block.causal or block.causal_window)
    ),
    "sample_from_anchor": block.slots == "next",
  }
  kind = blocks.kind_of(block)
  if kind == "dspark":
    keys |= deepspec.render_heads(head_config)
  elif kind == "dflash2":
    size, tokens = keys["block_size"], target.vocab_size
    keys |= blocks.render_dflash2(block, size, tokens, "speculators")
  return keys
