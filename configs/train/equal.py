r"""Trains drafters of the shipped target that can be compared: equal weights.

  python scripts/train.py --config=configs/train/equal.py:dflash \
    --folder=runs/equal/dflash-0

The word after the colon is one of KINDS. All see the same tokens in the same
order for as many steps, and hold 0.90 M weights beyond the target's, within a
tenth, but for the four that vary width and depth. Those that draft in one pass
are trained for 15 tokens (`short`: 7). A block sees the text through its own
keys and values alone, so it has as many KV heads as query heads. It has 16
slots (DFlash's, gamma 7), or 15 where they predict the next token, and runs all
of them however few tokens it drafts; but a causal one (jetspec) is cut to
k + 1. Passes of pard and peagle grow with the draft, too. Heads draft 1536
tokens of the vocabulary, `draft` and `pard` all 4096. What a kind is:
configs/train/drafter.py and draft.py, whose settings are used but for those
below. docs/training.md has the commands of the whole comparison.
"""

import runpy
from pathlib import Path

from ml_collections import config_dict

_LEVELS = 15
_ANCHORS = 64  # blocks of a sequence of 256
_GAMMA_7 = 0.8669  # exp(-1 / 7), of blocks of 16 (DFlash, section 4)
_GAMMA_4 = 0.7788  # of blocks of 8
# Muon: in so few steps AdamW teaches blocks next to nothing.
_OPTIONS = dict(
  steps=400,
  batch=4,
  warmup=20,
  optimizer="muon",
  learning_rate=1e-2,
  eval_every=200,
  save_every=100,
)


def _block(kind: str, mlp_width: int, **options) -> tuple[str, str, dict]:
  """Returns a block drafter of 15 draft tokens, like another but for options
  of `head_config.block`."""
  changes = {"mlp_width": mlp_width, "levels": _LEVELS, "num_kv_heads": 4}
  changes |= {f"block.{name}": value for name, value in options.items()}
  return "drafter", kind, changes


def _like_dflash(**changes) -> tuple[str, str, dict]:
  """Returns `dflash` with other options of `head_config`."""
  file, kind, others = _block("dflash", 488)
  return file, kind, others | changes


# name -> the file and the kind that it is like, and what differs of the head.
KINDS = {
  "draft": ("draft", "1m", {}),
  "pard": ("draft", "pard", {}),
  "eagle3": ("drafter", "eagle3", {"mlp_width": 1120}),
  "mtp": ("drafter", "compact_mtp", {}),
  "peagle": ("drafter", "peagle", {"mlp_width": 512, "levels": _LEVELS}),
  "dflash": _block("dflash", 488),
  "dpace": _block("dflash", 488),  # weights of positions by D-PACE
  "jetspec": _block("jetspec", 488),
  "windowed": _block("dflash", 488, window=64),
  "next": _block("dflash", 488, slots="next"),
  "dspark": _block("dspark", 400),
  "gated": _block("dspark", 396, successor="gated_markov"),
  "rnn": _block("dspark", 384, successor="rnn_markov"),
  "domino": _block("domino", 432),
  "selector": _block("dflash2", 400, taps=0),
  "dflash2": _block("dflash2", 376),
  # For its 7 tokens all of a block's slots.
  "short": _like_dflash(levels=7),
  # Where the curve turns: half and twice the width, one and four layers.
  "narrow": _like_dflash(width=64),
  "wide": _like_dflash(width=256),
  "shallow": _like_dflash(num_layers=1),
  "deep": _like_dflash(num_layers=4),
}


def get_config(kind: str = "dflash") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for one of KINDS."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  name, like, changes = KINDS[kind]
  path = Path(__file__).with_name(f"{name}.py")
  config = runpy.run_path(str(path))["get_config"](like)
  config.options.update(_OPTIONS)
  if name == "draft":
    if config.masks:
      config.masks.levels = _LEVELS
    return config
  for key, value in changes.items():
    config.update_from_flattened_dict({f"head_config.{key}": value})
  if config.head_config.features:  # the same layers of all
    config.cache = "runs/equal_states"
  if config.head_config.kind == "block":
    short = config.head_config.levels < _LEVELS
    config.loss.decay = _GAMMA_4 if short else _GAMMA_7
    config.loss.block.anchors = _ANCHORS
    if kind == "dpace":
      config.loss.block.weighting = "dpace"
  return config
