"""Recomputes tables of published papers from their formulas, in Markdown.

Leviathan et al. (arXiv:2211.17192), tables 1 and 2; Chen et al.
(arXiv:2302.01318), table 1; the scaling book's chapter on inference. Every row
holds the printed numbers; `ours` recomputes them.
"""

from typing import NamedTuple

import numpy as np

from specdec.roofline import chips, theory
from specdec.roofline.cost import Deployment
from specdec.roofline.shapes import Layer, Shape


class Free(NamedTuple):
  """A row of Leviathan et al.'s table 1: a draft of zero cost."""

  alpha: float
  k: int
  operations: float
  speed: float

  def ours(self) -> tuple[float, float]:
    """Returns (operations, speed)."""
    curve = theory.iid_prefix_acceptance(self.alpha, self.k)
    return theory.operations(curve, 0.0), theory.speedup(curve, 0.0)


LEVIATHAN_1 = tuple(
  Free(*row)
  for row in (
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86),
  )
)  # fmt: skip


class Decoded(NamedTuple):
  """A row of their tables 2 and 4: T5-XXL on one TPU v4, batch 1."""

  task: str
  draft: str
  temperature: int
  k: int
  alpha: float
  cost: float
  predicted: float
  measured: float

  def ours(self, rounding: float = 0.0) -> float:
    """Returns the speedup by theorem 3.8, alpha and cost off by `rounding`."""
    curve = theory.iid_prefix_acceptance(self.alpha + rounding, self.k)
    return theory.speedup(curve, self.cost - rounding)

  def span(self) -> tuple[float, float]:
    """Returns the range of `ours` over alpha and cost before rounding."""
    return self.ours(-0.005), self.ours(0.005)


LEVIATHAN_2 = (
  Decoded("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
  Decoded("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
  Decoded("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
  Decoded("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
  Decoded("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
  Decoded("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
  Decoded("CNNDM", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
  Decoded("CNNDM", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
  Decoded("CNNDM", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
  Decoded("CNNDM", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
  Decoded("CNNDM", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
  Decoded("CNNDM", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)


class Sampled(NamedTuple):
  """A row of Chen et al.'s table 1: Chinchilla on 16 TPU v4, K = 4."""

  benchmark: str
  milliseconds: float  # per token
  speedup: float
  baseline: float = 14.1  # milliseconds per token
  draft: float = 1.8  # milliseconds per draft token
  k: int = 4

  def tokens(self) -> float:
    """Returns tokens per target step, implied by the times."""
    return (self.baseline + self.k * self.draft) / self.milliseconds

  def alpha(self) -> float:
    """Returns the i.i.d. acceptance rate that gives as many tokens."""
    roots = np.roots([*[1.0] * self.k, 1 - self.tokens()])
    return float(max(root.real for root in roots if not root.imag))

  def ours(self) -> float:
    """Returns the speedup by theorem 3.8 at that rate, rounded to 3 digits."""
    curve = theory.iid_prefix_acceptance(round(self.alpha(), 3), self.k)
    return theory.speedup(curve, self.draft / self.baseline)


CHEN = (
  Sampled("XSum, nucleus", 7.52, 1.92),
  Sampled("XSum, greedy", 7.00, 2.01),
  Sampled("HumanEval, nucleus", 5.73, 2.46),
)


class Step(NamedTuple):
  """A decoding step of the scaling book: 13e9 weights, 8 v5e, context 8192."""

  batch: int
  milliseconds: float
  tokens_per_second: float

  def ours(self, collectives: bool = False) -> float:
    """Returns milliseconds; the book omits collectives."""
    kv = round(6.7e9 / 8192 / 2 / 40)
    layer = Layer(13 * 10**9 // 40, kv, kv_heads=40, score=2 * 40 * 128)
    shape = Shape("13 B", (layer,) * 40, 5120, 1, 40, True)
    chip = chips.get("v5e", bandwidth=8.2e11)
    cost = Deployment(shape, chip, ways=8).cost(self.batch, 1, 8192)
    omitted = sum(t.seconds for t in cost.terms if t.name == "collectives")
    return 1e3 * (cost.seconds - (0.0 if collectives else omitted))


SCALING_BOOK = (Step(1, 4.98, 200), Step(8, 12.13, 659))


def _table(title: str, header: str, rows) -> str:
  names = header.split("; ")
  lines = [names, ["---"] * len(names), *rows]
  table = ("| " + " | ".join(map(str, line)) + " |" for line in lines)
  return title + "\n\n" + "\n".join(table)


def tables() -> str:
  """Returns every table, recomputed and printed numbers."""
  free, decoded, sampled, steps = [], [], [], []
  for x in LEVIATHAN_1:
    operations, speed = (f"{number:.2f}" for number in x.ours())
    free.append((x.alpha, x.k, operations, x.operations, speed, x.speed))
  ratios = [x.measured / x.predicted for x in LEVIATHAN_2]
  for x, ratio in zip(LEVIATHAN_2, ratios):
    ours = f"{x.ours():.2f}", "{:.2f} to {:.2f}".format(*x.span())
    decoded.append((*x[:6], *ours, x.predicted, x.measured, f"{ratio:.2f}"))
  for x in CHEN:
    ours = f"{x.tokens():.2f}", f"{x.alpha():.3f}", f"{x.ours():.2f}"
    sampled.append((x.benchmark, x.milliseconds, *ours, x.speedup))
  for x in SCALING_BOOK:
    ours, whole = x.ours(), x.ours(collectives=True)
    rate = f"{1e3 * x.batch / ours:.0f}", x.tokens_per_second
    step = f"{ours:.2f}", x.milliseconds
    steps.append((x.batch, *step, *rate, f"{whole:.2f}"))
  return "\n\n".join(
    [
      _table(
        "Leviathan et al. (arXiv:2211.17192), table 1: a draft that costs "
        "nothing",
        "alpha; k; operations; printed; speed; printed",
        free,
      ),
      _table(
        "Table 2: T5-XXL on one TPU v4, batch 1",
        "task; draft; T; k; alpha; c; predicted here; alpha and c unrounded; "
        "printed; measured; measured / printed",
        decoded,
      ),
      f"Measured over printed prediction: {min(ratios):.2f} to "
      f"{max(ratios):.2f}.",
      _table(
        "Chen et al. (arXiv:2302.01318): Chinchilla 70B and its 4B draft, K = "
        "4, 14.1 and 1.8 ms a token",
        "benchmark; ms a token; tokens/pass; alpha implied; speedup here; "
        "printed",
        sampled,
      ),
      _table(
        "The scaling book: 13 B weights in bfloat16 on 8 TPU v5e, 8192 tokens",
        "batch; ms a step; printed; tokens/s; printed; ms with collectives",
        steps,
      ),
    ]
  )
