"""What lossy rules do to a distribution, at equal accepted length."""

import math
from collections.abc import Callable, Sequence

from specdec.report.tables import listed
from specdec.testing.tabular import Equal


def of_equal_length(rows: Sequence[Equal]) -> str:
  """Formats `tabular.at_equal_length`."""

  def unless_absent(form: str) -> Callable[[Equal], str]:
    return lambda row: "-" if math.isnan(row.accepted) else form.format(row)

  columns = {
    "accepted over rejection": "x {0.gain:.2f}",
    "rule": "{0.rule}",
    "accepted a round": unless_absent("{0.accepted:.3f}"),
    "total variation": unless_absent("{0.distance:.3f}"),
    "KL, nats": unless_absent("{0.divergence:.3f}"),
    "less likely by, nats": unless_absent("{0.surprise:+.3f}"),
  }
  return listed(rows, columns)
