"""Drafters: functions that return a `types.Drafter`, one file per idea."""

from specdec.drafters.early_exit import early_exit, early_exit_tree
from specdec.drafters.lookup import lookup
from specdec.drafters.model import model, model_tree

__all__ = ["early_exit", "early_exit_tree", "lookup", "model", "model_tree"]
