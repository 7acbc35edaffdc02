"""Drafters: functions that return a `types.Drafter`, one file per idea.

Those in `LEARNED` return a `heads.draft_head.DraftHead` instead, which is
trained as well; `heads.serve.drafter` makes a Drafter of it.
"""

import functools

from specdec.drafters.early_exit import early_exit
from specdec.drafters.fallback import fallback
from specdec.drafters.heads.draft_head import head_from_module
from specdec.drafters.heads.eagle import Eagle
from specdec.drafters.heads.eagle3 import Eagle3
from specdec.drafters.heads.hydra import Hydra
from specdec.drafters.heads.medusa import Medusa
from specdec.drafters.heads.mtp import Mtp
from specdec.drafters.heads.prophet import Prophet
from specdec.drafters.heads.trained_exit import Exit
from specdec.drafters.layer_skip import Threshold, layer_skip
from specdec.drafters.lookup import lookup
from specdec.drafters.model import model
from specdec.drafters.quantized import quantized

# (head config, target's config, ids, place) -> DraftHead
eagle, eagle3, hydra, medusa, mtp, prophet, trained_exit = (
  functools.partial(head_from_module, module)
  for module in (Eagle, Eagle3, Hydra, Medusa, Mtp, Prophet, Exit)
)
LEARNED = {  # by HeadConfig.kind
  "eagle": eagle,
  "eagle3": eagle3,
  "exit": trained_exit,
  "hydra": hydra,
  "medusa": medusa,
  "mtp": mtp,
  "prophet": prophet,
}

__all__ = [
  "LEARNED",
  "Threshold",
  "eagle",
  "eagle3",
  "early_exit",
  "fallback",
  "hydra",
  "layer_skip",
  "lookup",
  "medusa",
  "model",
  "mtp",
  "prophet",
  "quantized",
  "trained_exit",
]
