"""DFlash and DFlash2 as z-lab publishes them, and Domino.

z-lab/dflash, dflash/model.py; DFlash2 is an architecture of its own, with keys
for its convolutions and its selector.

Keys of its own stand in `dflash_config`, of older files some at the top level.
Where a config does not say, layers with a window are causal inside the block,
others see all of it; what it says in is_causal goes before dflash_config.causal
(vllm-project/vllm, vllm/model_executor/models/qwen3_dflash.py; causal_head is
JetSpec's name for it). It reads the target's embedding and vocabulary
projection. A Domino is one with projector_type 'domino'
(sgl-project/SpecForge, configs/qwen3-8b-domino.json).
"""

from collections.abc import Callable
from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import blocks
from specdec.checkpoints.formats.files import Files
from specdec.checkpoints.formats.stored import Stored, Target, typed
from specdec.checkpoints.hf_values import check_options
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.head_presets import evenly_spread
from specdec.utils.spelling import check_choice

NAME = "dflash"
_ARCHITECTURE, _NESTED = "DFlashDraftModel", "dflash_config"
_DFLASH2 = "DFlash2DraftModel"
_DOMINO = "DominoDraftModel"  # the first with a successor
_CAUSAL = "causal", "causal_head"
_SETTINGS = (
  *("block_size", "mask_token_id", blocks.LAYER_IDS, *_CAUSAL),
  *("num_target_layers", "final_logit_softcapping", "projector_type"),
  *("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
)
# Options -> the values under which this is exact.
_ONLY = {
  "attention_mode": ("gqa", "mha", None),
  "attention_sink_bias": (False, None),
  "input_embedding_scale": (1.0, None),
  "is_neox_style": (True, None),
  "logit_scale": (1.0, None),
  "output_multiplier": (1.0, None),
  "use_swa": (False, None),
}


def matches(files: Files) -> bool:
  """Whether a folder is of this layout."""
  names = hf_config.architectures(files.config)
  return not {_ARCHITECTURE, _DFLASH2, _DOMINO}.isdisjoint(names)


def _check_options(config, nested, more, source: str) -> None:
  """Refuses what this drafter would have beyond its layers.

  Args:
    more: keys of its kind of drafter.
  """
  for key in nested:
    keys = *_SETTINGS, *more, *_ONLY
    check_choice(f"{source}: key of {_NESTED}", key, keys)
  for options in (config, nested):
    check_options(options, source, **_ONLY)


def _causal(config, nested, source: str) -> bool | None:
  """Returns whether it says to be causal inside the block; None: it doesn't."""
  causal = typed(config, "is_causal", bool, source, None)
  for key in _CAUSAL:
    if causal is None:
      causal = blocks.setting(config, nested, key, bool, source, None)
  return causal


def _check_embedding(target: Target | None, source: str) -> None:
  """Refuses a target of Gemma's: its embedding would give a block's tokens
  times sqrt(width), and ours reads the table."""
  if target and target.scale_embedding:
    raise ValueError(
      f"{source}: readers of this layout scale the embedding of such a target, "
      "and specdec's block drafters do not"
    )


def _successor(setting: Callable, source: str) -> dict[str, Any]:
  """Returns the fields of BlockConfig of slots and what follows them.

  Raises:
    ValueError: a Domino begins or predicts elsewhere than its authors'.
  """
  projector = setting("projector_type", str, "dflash")
  check_choice(f"{source}: projector_type", projector, ("dflash", "domino"))
  domino = projector == "domino"
  wanted = {"shift_label": domino, "pure_draft_prefix_len": int(domino)}
  for key, accepted in wanted.items():
    value = setting(key, type(accepted), type(accepted)())
    if value != accepted:
      raise ValueError(
        f"{source} has {key} = {value!r} with projector_type = {projector!r}; "
        f"accepted: {accepted!r}"
      )
  if not domino:
    return {}
  sizes = {"rank": setting("emb_dim", int)}
  sizes["state"] = setting("gru_hidden_dim", int)
  return {"slots": "next", "successor": "gru"} | sizes


def parse(files: Files, target: Target | None) -> Stored:
  """Returns what a folder holds; raises ValueError where that is unknown."""
  config, source = files.config, files.source
  nested = typed(config, _NESTED, dict, source, {})
  is_dflash2 = _DFLASH2 in hf_config.architectures(config)
  more = blocks.DFLASH2.values() if is_dflash2 else ()
  _check_options(config, nested, more, source)

  def setting(key, kind, *default):
    return blocks.setting(config, nested, key, kind, source, *default)

  fields, windows, vocab_size = blocks.decoder(config, source)
  size = setting("block_size", int)
  if size < 2:
    raise ValueError(f"{source} has block_size = {size}; it must be >= 2")
  count = setting("num_target_layers", int, None)
  softcap = setting("final_logit_softcapping", float, None)
  blocks.check_target(softcap, count, target, source)
  _check_embedding(target, source)
  layers = setting(blocks.LAYER_IDS, list, None)
  if layers is None and count:
    layers = evenly_spread(count, fields["num_layers"])
  successor = _successor(setting, source)
  if is_dflash2 and successor:
    raise ValueError(
      f"{source} is a DFlash2 with projector_type = 'domino'; accepted: "
      "'dflash'"
    )
  if is_dflash2:
    successor = blocks.parse_dflash2(
      lambda key: setting(key, int), size, vocab_size, source
    )
  causal = _causal(config, nested, source)
  seen = blocks.seen(windows, causal, size, source)
  head_config = HeadConfig(
    kind="block",
    layout="published",
    levels=size if successor.get("slots") == "next" else size - 1,
    features=blocks.features_of(layers, 0, source, target),
    block=BlockConfig(
      mask_token=setting("mask_token_id", int), **seen, **successor
    ),
    **blocks.owned(files.shapes),
    **fields,
  )
  return Stored(head_config, blocks.table(head_config), vocab_size)


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config.json of a head, as `parse` reads it.

  Raises:
    ValueError: the layout has no place for one of its options.
  """
  block = head_config.block
  domino = block and block.successor == "gru"
  wanted = {
    "kind": ("block",),
    "block.successor": ("none", "gru", "selector"),
    "block.slots": ("next" if domino else "in_place",),
    "block.confidence": (False,),
    "vocabulary": (0,),
    "embed": ("shared",),
    "head": ("shared",),
  }
  blocks.check_written(head_config, NAME, wanted)
  _check_embedding(target, NAME)
  config = blocks.render(head_config, target, dtype)
  nested = {
    "block_size": config["block_size"],
    "mask_token_id": config.pop("mask_token_id"),
    blocks.LAYER_IDS: blocks.layers_left(head_config, 0, NAME, target),
  }
  if target.logit_softcap:
    nested["final_logit_softcapping"] = target.logit_softcap
  if domino:
    nested |= {"projector_type": "domino", "shift_label": True}
    nested |= {"pure_draft_prefix_len": 1, "emb_dim": block.rank}
    nested["gru_hidden_dim"] = block.state or head_config.width
  dflash2 = block.successor == "selector"
  if dflash2:
    nested |= blocks.render_dflash2(
      block, config["block_size"], target.vocab_size, NAME
    )
  if block.causal or not block.causal_window:
    config["is_causal"] = nested["causal"] = block.causal
  return config | {
    "architectures": [_DFLASH2 if dflash2 else _ARCHITECTURE],
    "num_target_layers": target.num_layers,
    _NESTED: nested,
  }


table = blocks.table
