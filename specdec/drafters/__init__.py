"""Drafters: functions that return a `types.Drafter`, one file per idea."""

from specdec.drafters.lookup import lookup
from specdec.drafters.model import model

__all__ = ["lookup", "model"]
