r"""Trains drafters of the shipped target that can be compared: equal weights.

  for kind in draft eagle3 mtp dflash jetspec next dspark; do
    python scripts/train.py --config=configs/train/equal.py:$kind \
      --folder=runs/equal/$kind-0
  done
  python scripts/reproduce.py --only=equal_greedy,equal_sampled

The word after the colon is one of KINDS. All see the same tokens in the same
order for as many steps, and hold 0.90 M weights beyond the target's, within a
tenth, but for the four that vary width and depth. Every block has 16 slots
(DFlash's, gamma 7), so that drafts of 3 to 15 tokens cost the same pass. What a
kind is: configs/train/drafter.py and draft.py, whose settings are used but for
those below.
"""

import runpy
from pathlib import Path

from ml_collections import config_dict

_LEVELS = 15
_GAMMA_7 = 0.8669  # exp(-1 / 7), of blocks of 16 (DFlash, section 4)
_OPTIONS = dict(steps=400, batch=4, warmup=20, eval_every=200, save_every=100)


def _block(kind: str, mlp_width: int, **options) -> tuple[str, str, dict]:
  """Returns a block drafter of 15 draft tokens, like another but for options
  of `head_config.block`."""
  changes = {"mlp_width": mlp_width, "levels": _LEVELS}
  changes |= {f"block.{name}": value for name, value in options.items()}
  return "drafter", kind, changes


# name -> the file and the kind that it is like, and what differs of the head.
KINDS = {
  "draft": ("draft", "1m", {}),
  "pard": ("draft", "pard", {}),
  "eagle3": ("drafter", "eagle3", {"mlp_width": 384}),
  "mtp": ("drafter", "mtp", {}),
  "peagle": ("drafter", "peagle", {"mlp_width": 160, "levels": _LEVELS}),
  "dflash": _block("dflash", 384),
  "jetspec": _block("jetspec", 384),
  "windowed": _block("dflash", 384, window=64),
  "next": _block("dflash", 384, slots="next"),
  "dspark": _block("dspark", 384),
  "gated": _block("dspark", 384, successor="gated_markov"),
  "rnn": _block("dspark", 384, successor="rnn_markov"),
  "domino": _block("domino", 384),
  "selector": _block("dflash2", 384, taps=0),
  "dflash2": _block("dflash2", 384),
  # Where the curve turns: half and twice the width, one and four layers.
  "narrow": ("drafter", "dflash", {"width": 64}),
  "wide": ("drafter", "dflash", {"width": 256}),
  "shallow": ("drafter", "dflash", {"num_layers": 1}),
  "deep": ("drafter", "dflash", {"num_layers": 4}),
}


def get_config(kind: str = "dflash") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for one of KINDS."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  name, like, changes = KINDS[kind]
  path = Path(__file__).with_name(f"{name}.py")
  config = runpy.run_path(str(path))["get_config"](like)
  config.options.update(_OPTIONS)
  for key, value in changes.items():
    config.update_from_flattened_dict({f"head_config.{key}": value})
  if changes.get("levels") == _LEVELS and "block" in config.loss:
    config.loss.decay = _GAMMA_7
  return config
