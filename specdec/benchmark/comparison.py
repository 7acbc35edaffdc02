"""Acceptance rules and draft shapes side by side, at equal target tokens.

Invariant: what is expected of the rules of one shape is expected of the very
same drafts; what is measured is each rule's own text, timed in turns with plain
decoding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec import decode, draft_shape, draft_tree
from specdec.benchmark import expected_acceptance, metrics, results, runs
from specdec.benchmark.decoder import Decoder, batches_of
from specdec.testing import enumeration
from specdec.types import AcceptanceRule, DraftSpec
from specdec.utils import terminal

RULES = (
  "rejection", "block", "kseq", "coupled", "naive",
  "lenience", "typical", "relaxed",
)  # fmt: skip
SHAPES = ("chain", "2 chains", "4 chains", "optimal tree", "dynamic tree")
_RANKS = 8  # siblings whose acceptance is measured


class Shape(NamedTuple):
  """Drafts of one kind, and the rules that are right for them."""

  size: int
  name: str
  siblings: str
  levels: int
  expansion: draft_shape.DraftShape | None  # None: a chain
  rules: tuple[str, ...]  # by name


def shapes_of(
  size: int,
  ranks: dict[str, Sequence[float]],
  rules: dict[str, AcceptanceRule],
) -> list[Shape]:
  """All shapes of so many draft tokens, with those of the rules that are right.

  A tree that the ranks make smaller (deeper children are never kept) is left
  out.

  Args:
    ranks: by kind of siblings, how often a node's r-th child is kept.
    rules: by name.
  """
  shapes = []

  def add(name: str, siblings: str, levels: int, shape) -> None:
    spec = (shape or draft_shape.chain(levels)).spec
    # A small tree may be a chain, which is there already.
    right = tuple(
      name
      for name, rule in rules.items()
      if _fits(spec, rule) and not (shape and rule.chains_only)
    )
    if spec.max_nodes == size + 1 and right:
      shapes.append(Shape(size, name, siblings, levels, shape, right))

  add("chain", "none", size, None)
  for count in (2, 4):
    if size % count == 0:
      parents = draft_tree.parallel(count, size // count)
      for siblings in ("iid", "without_replacement"):
        shape = draft_shape.static(parents, siblings)
        add(f"{count} chains", siblings, size // count, shape)
  levels = 1
  for siblings, by_rank in ranks.items():
    parents = draft_tree.from_paths(draft_tree.optimal(by_rank, size))
    shape = draft_shape.static(parents, siblings)
    levels = max(levels, shape.spec.max_depth)
    add("optimal tree", siblings, shape.spec.max_depth, shape)
  # As deep as those, so wide that there are enough draft tokens to choose from,
  # and tried in no more nodes than are kept (early exit has room for those
  # alone).
  top = min(4, size)
  levels = min(levels, 1 + size // top)
  while top + (levels - 1) * top**2 < size:
    levels += 1
  add(
    "dynamic tree",
    "deterministic",
    levels,
    draft_shape.dynamic(top, levels, size),
  )
  return shapes


def _fits(spec: DraftSpec, rule: AcceptanceRule) -> bool:
  try:
    decode.check_pair(spec, rule)
  except ValueError:
    return False
  return True


class RuleComparison:
  """Compares rules and shapes on the same prompts."""

  def __init__(
    self,
    encoded: Sequence[Sequence[int]],
    batch: int,
    rules: dict[str, AcceptanceRule],
    make: Callable[[Shape, AcceptanceRule], Decoder],
  ):
    """Args:
    encoded: token ids of the prompts.
    batch: how many are decoded together.
    rules: by name.
    make: builds the decoder of a shape and a rule.
    """
    self._encoded, self._make, self.rules = encoded, make, rules
    self._batches = batches_of(encoded, batch)
    self._baseline: Decoder | None = None

  def _decoder(self, shape: Shape, rule: str) -> Decoder:
    return self._make(shape, self.rules[rule])

  def ranks(self, siblings: str) -> list[float]:
    """Measures how often the r-th of many siblings is accepted."""
    star = draft_shape.static(draft_tree.parallel(_RANKS, 1), siblings)
    decoder = self._decoder(
      Shape(_RANKS, "", siblings, 1, star, ()), "rejection"
    )
    with terminal.progress(f"counting acceptance by rank, {siblings}"):
      ranks = expected_acceptance.acceptance_by_rank(decoder, self._encoded)
    # float32 may sum to 1 + 1e-7.
    return (ranks / max(1.0, ranks.sum())).tolist()

  def expected(self, shape: Shape) -> dict[str, dict]:
    """Returns, by rule, the expected accepted tokens a round, and the tokens
    per target step over rejection's.

    Rejection writes the text, so a lossy rule is evaluated on text of the
    target's distribution.
    """
    decoder = self._decoder(shape, "rejection")
    evaluated = [decoder.rule, *(self.rules[rule] for rule in shape.rules)]
    what = f"counting expected tokens, {shape.name} of {shape.size}"
    with terminal.progress(what):
      sums, rounds = expected_acceptance.expected_lengths(
        decoder, self._encoded, evaluated
      )
    token, *sums = sums

    def estimate(over, under):
      finite = np.all(np.isfinite(over)) and np.all(np.isfinite(under))
      ratio = metrics.ratio(over, under) if finite else metrics.Estimate(None)
      return dataclasses.asdict(ratio)

    return {
      rule: {
        "expected": estimate(total, rounds),
        "gain": estimate(total + rounds, token + rounds),
      }
      for rule, total in zip(shape.rules, sums)
    }

  def loss(self, shape: Shape, rule: str, temperature: float) -> float:
    """Returns the total variation on random tables; 0 if lossless."""
    if self.rules[rule].lossless:
      return 0.0
    return enumeration.tabular_loss(
      self.rules[rule], shape.siblings, temperature
    )

  def measured(self, shape: Shape, rule: str) -> tuple[results.Run, float]:
    """Decodes every prompt, in turns with the baseline.

    Returns:
      The run, and the seconds of a round.
    """
    decoder = self._decoder(shape, rule)
    first = self._batches[0].rows
    with terminal.progress(f"compiling {shape.name} of {shape.size}, {rule}"):
      decoder.warm_up(first)
      if self._baseline is None:
        self._baseline = decoder.baseline()
        self._baseline.warm_up(first)
    ways = {"rule": decoder, runs.BASELINE: self._baseline}
    comparison = runs.compare(ways, self._batches)
    run = comparison.run("rule", shape.levels)
    rounds = sum(one.num_rounds for one in comparison.of("rule"))
    return run, run.speed.seconds / rounds
