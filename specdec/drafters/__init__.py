"""Drafters: functions that return a `types.Drafter`, one file per idea.

Those in `LEARNED` return a `heads.draft_head.DraftHead` instead, or a
`heads.block_head.BlockHead`, which are trained as well; `from_head` makes a
Drafter of either.
"""

import functools

from specdec.drafters.early_exit import early_exit
from specdec.drafters.fallback import fallback
from specdec.drafters.heads import block_serve, serve
from specdec.drafters.heads.block import Block
from specdec.drafters.heads.block_head import block_from_module
from specdec.drafters.heads.draft_head import head_from_module
from specdec.drafters.heads.eagle import Eagle, PublishedEagle
from specdec.drafters.heads.eagle3 import (
  Eagle3,
  PEagle,
  PublishedEagle3,
  PublishedPEagle,
)
from specdec.drafters.heads.hydra import Hydra
from specdec.drafters.heads.medusa import Medusa, PublishedMedusa
from specdec.drafters.heads.mlp_speculator import MlpSpeculator
from specdec.drafters.heads.mtp import Mtp, PublishedMtp
from specdec.drafters.heads.prophet import Prophet
from specdec.drafters.heads.redrafter import ReDrafter
from specdec.drafters.heads.trained_exit import Exit
from specdec.drafters.layer_skip import Threshold, layer_skip
from specdec.drafters.lookup import lookup
from specdec.drafters.model import model, translated
from specdec.drafters.pard import pard
from specdec.drafters.quantized import quantized
from specdec.drafters.recycling import recycling
from specdec.drafters.sparse import sparse
from specdec.drafters.suffix import suffix
from specdec.types import Drafter


def _head_of(compact, published=None):
  """Returns a constructor of a kind's heads, of either layout."""

  def construct(head_config, target, ids=None, place=None):
    module = published if head_config.is_published else compact
    return head_from_module(module, head_config, target, ids, place)

  return construct


def from_head(
  head, target, shape, place=None, max_external_drafts=0
) -> Drafter:
  """Returns the drafter of a trained head; see `heads.serve.drafter`."""
  of = block_serve if head.head_config.block else serve
  return of.drafter(head, target, shape, place, max_external_drafts)


# By HeadConfig.kind: (head config, target's config, ids, place) -> AnyHead.
LEARNED = {
  "block": functools.partial(block_from_module, Block),
  "eagle": _head_of(Eagle, PublishedEagle),
  "eagle3": _head_of(Eagle3, PublishedEagle3),
  "exit": _head_of(Exit),
  "hydra": _head_of(Hydra),
  "medusa": _head_of(Medusa, PublishedMedusa),
  "mlp_speculator": _head_of(None, MlpSpeculator),
  "mtp": _head_of(Mtp, PublishedMtp),
  "peagle": _head_of(PEagle, PublishedPEagle),
  "prophet": _head_of(Prophet),
  "redrafter": _head_of(None, ReDrafter),
}

__all__ = [
  "LEARNED",
  "Threshold",
  "early_exit",
  "fallback",
  "from_head",
  "layer_skip",
  "lookup",
  "model",
  "pard",
  "quantized",
  "recycling",
  "sparse",
  "suffix",
  "translated",
]
