"""Planted bugs of a drafter: the conformance kit names what they break."""

import pytest

from specdec import acceptance
from specdec.testing import check_drafter
from specdec.testing.drafter_conformance import INVARIANTS


def broken(invariant, drafter, target, params, sentence=""):
  """Asserts that this one invariant is broken, and that the kit says so."""
  with pytest.raises(AssertionError, match=f"breaks '{invariant}'") as error:
    check_drafter(
      drafter,
      target,
      params,
      rules=(acceptance.rejection(),),
      skip={*INVARIANTS} - {invariant},
    )
  assert sentence in str(error.value), error.value
