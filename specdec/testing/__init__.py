"""Exact checks: a table model, enumeration of whole distributions, and the
conformance kit for drafters and acceptance rules.
"""

from specdec.testing.drafter_conformance import check_drafter
from specdec.testing.rule_conformance import check_rule

__all__ = ["check_drafter", "check_rule"]
