"""Acceptance rules: functions that return a `types.AcceptanceRule`."""

from specdec.acceptance.exact import coupled, greedy
from specdec.acceptance.rejection import rejection

__all__ = ["coupled", "greedy", "rejection"]
