"""Tables of training: a line for each drafter, or kind of joint training."""

from collections.abc import Sequence

from specdec.benchmark.metrics import Estimate
from specdec.utils import terminal

# A run: name, tokens trained on, draft tokens a round, and after its last
# evaluation acceptance probability (text), that of a round's first draft token
# (decoding), tokens per target pass, and what the last doubling gained.
CurveRow = tuple[str, int, int, float, float, float, float | None]
# A kind: name, seeds, held-out loss, its difference from the baseline's, and
# tokens per target pass.
JointRow = tuple[str, Sequence[int], Estimate, Estimate, Estimate]


def curves(rows: Sequence[CurveRow]) -> str:
  """Formats learning curves."""
  header = (
    "run", "tokens", "k", "kept", "first", "tokens a pass", "last doubling"
  )  # fmt: skip
  return terminal.columns(
    header,
    [
      (
        name,
        f"{tokens:,}",
        str(k),
        f"{acceptance:.3f}",
        f"{first:.2f}",
        f"{tokens_per_pass:.2f}",
        "-" if doubling is None else f"{doubling:+.2f}",
      )
      for name, tokens, k, acceptance, first, tokens_per_pass, doubling in rows
    ],
  )


def joint(rows: Sequence[JointRow]) -> str:
  """Formats a comparison of joint training."""
  header = ("kind", "seeds", "loss", "less none's", "tokens per pass")
  return terminal.columns(
    header,
    [
      (
        name,
        " ".join(map(str, seeds)),
        _estimate(loss, 4),
        _estimate(difference, 4),
        _estimate(tokens_per_pass, 2),
      )
      for name, seeds, loss, difference, tokens_per_pass in rows
    ],
  )


def speed(
  seconds: float,
  tokens_per_second: float,
  flops: float,
  gemm_flops: float,
  load: Sequence[float],
) -> str:
  """Formats the speed of a training step.

  Args:
    flops, gemm_flops: FLOP/s, of a step and of a matrix product.
    load: averages of the number of runnable processes.
  """
  return terminal.table(
    [
      ("one step", f"{seconds * 1e3:.0f} ms"),
      ("tokens", f"{tokens_per_second:,.0f} a second"),
      ("arithmetic", f"{flops / 1e9:.1f} GFLOP/s"),
      ("a float32 product", f"{gemm_flops / 1e9:.1f} GFLOP/s"),
      ("share of it", f"{flops / gemm_flops:.0%}"),
      ("load", " ".join(f"{average:.2f}" for average in load)),
    ]
  )


def _estimate(estimate: Estimate, digits: int) -> str:
  """Formats as '1.234 ± 0.005'; '-' where there is nothing."""
  if estimate.value is None:
    return "-"
  value = f"{estimate.value:.{digits}f}"
  if estimate.error is None:
    return value
  return f"{value} ± {estimate.error:.{digits}f}"
