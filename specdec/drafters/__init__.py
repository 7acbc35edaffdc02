"""Drafters: functions that return a `types.Drafter`, one file per idea."""

from specdec.drafters.early_exit import early_exit
from specdec.drafters.lookup import lookup
from specdec.drafters.model import model

__all__ = ["early_exit", "lookup", "model"]
