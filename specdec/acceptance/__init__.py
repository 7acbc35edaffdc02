"""Acceptance rules: functions that return a `types.AcceptanceRule`."""

from specdec.acceptance.block import block
from specdec.acceptance.exact import coupled, greedy
from specdec.acceptance.kseq import kseq
from specdec.acceptance.lossy import fly, lenience, relaxed, typical
from specdec.acceptance.multipath import multipath
from specdec.acceptance.naive import naive
from specdec.acceptance.rejection import rejection
from specdec.acceptance.synthetic import synthetic
from specdec.acceptance.traversal import traversal

__all__ = [
  "block",
  "coupled",
  "fly",
  "greedy",
  "kseq",
  "lenience",
  "multipath",
  "naive",
  "rejection",
  "relaxed",
  "synthetic",
  "traversal",
  "typical",
]
