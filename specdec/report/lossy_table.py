"""What rules do to a distribution: lossless ones, and lossy ones at equal
accepted length."""

from collections.abc import Callable, Sequence

from specdec.report import tables


def of_equal_length(rows: Sequence[dict], form=tables.listed) -> str:
  """Formats `tabular.at_equal_length`, each as a dict.

  Args:
    form: `tables.listed`, or `tables.markdown`.
  """

  def unless_absent(text: str) -> Callable[[dict], str]:
    return lambda row: "-" if row["accepted"] is None else text.format(row)

  columns = {
    "accepted over rejection": "x {0[gain]:.2f}",
    "rule": "{0[rule]}",
    "accepted a round": unless_absent("{0[accepted]:.3f}"),
    "total variation": unless_absent("{0[distance]:.3f}"),
    "KL, nats": unless_absent("{0[divergence]:.3f}"),
    "less likely by, nats": unless_absent("{0[surprise]:+.3f}"),
  }
  return form(rows, columns)


def of_lossless(rows: Sequence[dict], form=tables.listed) -> str:
  """Formats `tabular.of_lossless_rules`, each as a dict; `form` as above."""
  columns = {
    "rule": "{0[rule]}",
    "siblings": "{0[siblings]}",
    "drafts enumerated": "{0[drafts]:,}",
    "accepted a round": "{0[accepted]:.3f}",
    "the most that a rule could": "{0[optimum]:.3f}",
    "total variation": "{0[distance]:.1e}",
  }
  return form(rows, columns)
