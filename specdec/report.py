"""What a run amounted to: the numbers of its table, its JSON and its page.

Invariant: each number is worked out here once, so that all three agree.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from specdec.analysis import metrics
from specdec.types import Stats


@dataclasses.dataclass(frozen=True)
class Report:
  """Speculative and plain decoding of the same prompts, side by side."""

  counts: dict  # metrics.acceptance
  rate: float  # tokens/s
  plain_rate: float  # tokens/s
  same: bool | None  # whether the texts are equal; None: not comparable
  differences: Sequence[str]  # where they are not, a sentence a prompt
  compile_seconds: float

  @property
  def speedup(self) -> float:
    """Speculative over plain tokens/s."""
    return self.rate / self.plain_rate

  def headline(self) -> list[tuple[str, str]]:
    """The two numbers that matter most."""
    return [
      ("tokens per target pass", f"{self.counts['tokens_per_pass']:.2f}"),
      ("speedup", f"{self.speedup:.2f} x"),
    ]

  def rows(self) -> list[tuple[str, str]]:
    """The summary table: name and value."""
    tokens_per_pass, speedup = self.headline()
    by_position = self.counts["acceptance_by_position"]
    same = {None: "not comparable: other noise, same law", True: "yes"}.get(
      self.same, "no: " + "; ".join(self.differences[:3])
    )
    return [
      tokens_per_pass,
      (
        "acceptance by position",
        " ".join("-" if a is None else f"{a:.2f}" for a in by_position) or "-",
      ),
      ("speculative", f"{self.rate:.1f} tokens/s"),
      ("plain", f"{self.plain_rate:.1f} tokens/s"),
      speedup,
      ("same text as plain", same),
      ("compiled in", f"{self.compile_seconds:.1f} s"),
    ]

  def document(self) -> dict:
    """The numbers for JSON."""
    return {
      **self.counts,
      "tokens_per_second": self.rate,
      "plain_tokens_per_second": self.plain_rate,
      "speedup": self.speedup,
      "identical_to_plain": self.same,
    }


def report(
  stats: Sequence[Stats],
  tokens: tuple[int, int],
  seconds: tuple[float, float],
  differences: Sequence[str] | None,
  compile_seconds: float,
) -> Report:
  """Sums up a run.

  Args:
    stats: of the speculative batches.
    tokens: how many came out, speculatively and plainly.
    seconds: how long that took, likewise.
    differences: None where the two texts need not be equal.
  """
  rate, plain_rate = (n / s for n, s in zip(tokens, seconds))
  return Report(
    metrics.acceptance(stats),
    rate,
    plain_rate,
    None if differences is None else not differences,
    differences or (),
    compile_seconds,
  )


def check_writable(name: str, path: str) -> None:
  """Raises ValueError where `path`, given as `name`, could not be written."""
  file = pathlib.Path(path)
  if file.is_dir():
    raise ValueError(f"{name}={path} is a folder; give a file in it")
  if not file.parent.is_dir():
    raise ValueError(
      f"{name}={path}: there is no folder {file.parent}; make it first"
    )
  if not os.access(file if file.exists() else file.parent, os.W_OK):
    raise ValueError(f"{name}={path} cannot be written; choose another place")
