"""Drafters: functions that return a `types.Drafter`, one file per idea.

Those in `LEARNED` return a `heads.draft_head.DraftHead` instead, which is
trained as well; `heads.serve.drafter` makes a Drafter of it.
"""

from specdec.drafters.early_exit import early_exit
from specdec.drafters.fallback import fallback
from specdec.drafters.heads.eagle import eagle
from specdec.drafters.heads.eagle3 import eagle3
from specdec.drafters.heads.hydra import hydra
from specdec.drafters.heads.medusa import medusa
from specdec.drafters.heads.mtp import mtp
from specdec.drafters.heads.prophet import prophet
from specdec.drafters.heads.trained_exit import trained_exit
from specdec.drafters.layer_skip import Threshold, layer_skip
from specdec.drafters.lookup import lookup
from specdec.drafters.model import model

# HeadConfig.kind -> (head config, target's config, ids, place) -> DraftHead
LEARNED = {
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
  "trained_exit",
]
