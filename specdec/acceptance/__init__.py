"""Acceptance rules: functions that return a `types.AcceptanceRule`."""

from specdec.acceptance.exact import coupled, greedy
from specdec.acceptance.rejection import rejection
from specdec.acceptance.synthetic import synthetic

__all__ = ["coupled", "greedy", "rejection", "synthetic"]
