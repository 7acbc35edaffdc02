"""Heads in the shapes they were published in, for a target of any size.

For costs, compiling and random weights: nobody has trained them.
"""

from collections.abc import Callable
from typing import Any

from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.utils.spelling import check_choice


def _eagle3(target: TransformerConfig) -> dict[str, Any]:
  """One layer, three streams, 32,000 tokens (github.com/SafeAILab/EAGLE)."""
  few = 32_000 if target.vocab_size > 32_000 else 0
  last = target.num_layers
  features = sorted({2, last // 2, last - 3})
  return dict(kind="eagle3", features=tuple(features), vocabulary=few, levels=7)


def evenly_spread(num_layers: int, count: int) -> list[int]:
  """Returns the layers, of L, whose outputs a DFlash reads by default: `count`
  of 1..L - 3 (github.com/z-lab/dflash)."""
  if count == 1:
    return [num_layers // 2]
  return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def _block(target: TransformerConfig, levels: int, **options) -> dict[str, Any]:
  """Five layers, five hidden states where the target has as many to read."""
  leaving = evenly_spread(target.num_layers, 5)
  block = BlockConfig(mask_token=target.vocab_size - 1, **options)
  return dict(
    kind="block",
    features=tuple(dict.fromkeys(i + 1 for i in leaving)),
    num_layers=5,
    levels=levels,
    head="shared",
    block=block,
  )


def _dflash(target: TransformerConfig) -> dict[str, Any]:
  """Blocks of 16 (github.com/z-lab/dflash)."""
  return _block(target, 15)


def _dspark(target: TransformerConfig) -> dict[str, Any]:
  """Seven tokens, transitions of rank 256 (deepseek-ai/DeepSpec)."""
  options = dict(successor="markov", rank=256, confidence=True)
  return _block(target, 7, slots="next", **options)


_PRESETS: dict[str, Callable[[TransformerConfig], dict[str, Any]]] = {
  "eagle3": _eagle3,
  "dflash": _dflash,
  "dspark": _dspark,
}
NAMES = tuple(_PRESETS)


def get(name: str, target: TransformerConfig) -> HeadConfig:
  """Returns the head of a name, its layers of the target's shape.

  Raises:
    ValueError: the name is unknown, or the target has fewer than 6 layers.
  """
  check_choice("head preset", name, NAMES)
  if target.num_layers < 6:
    raise ValueError(
      f"preset:{name} reads streams in the middle of a target; this one has "
      f"{target.num_layers} layers, give one of at least 6"
    )
  return HeadConfig(
    layout="published",
    width=target.width,
    mlp_width=target.mlp_width,
    num_heads=target.num_heads,
    num_kv_heads=target.num_kv_heads,
    head_dim=target.head_dim,
    rope_theta=target.rope_theta,
    **_PRESETS[name](target),
  )
