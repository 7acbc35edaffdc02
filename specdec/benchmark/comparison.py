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
from specdec.benchmark import expected_acceptance, metrics, results, timing
from specdec.benchmark.session import Session
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
  found = []

  def add(name: str, siblings: str, levels: int, expansion) -> None:
    spec = DraftSpec(size + 1, levels, (size + 1,))
    if expansion is not None:
      spec = expansion.spec
    right = tuple(n for n, rule in rules.items() if _fits(spec, rule))
    if spec.max_nodes == size + 1 and right:
      found.append(Shape(size, name, siblings, levels, expansion, right))

  add("chain", "none", size, None)
  for count in (2, 4):
    if size % count == 0:
      parents = draft_tree.parallel(count, size // count)
      for siblings in ("iid", "without_replacement"):
        expansion = draft_shape.static(parents, siblings)
        add(f"{count} chains", siblings, size // count, expansion)
  levels = 1
  for siblings, by_rank in ranks.items():
    parents = draft_tree.from_paths(draft_tree.optimal(by_rank, size))
    expansion = draft_shape.static(parents, siblings)
    levels = max(levels, expansion.spec.max_depth)
    add("optimal tree", siblings, expansion.spec.max_depth, expansion)
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
  return found


def _fits(spec: DraftSpec, rule: AcceptanceRule) -> bool:
  try:
    decode.check_pair(spec, rule)
  except ValueError:
    return False
  return True


class Bench:
  """Prompts, and a way to a session for any shape and rule."""

  def __init__(
    self,
    encoded: Sequence[Sequence[int]],
    batch: int,
    rules: dict[str, AcceptanceRule],
    make: Callable[[Shape, AcceptanceRule], Session],
  ):
    self._encoded, self._make, self.rules = encoded, make, rules
    self._baseline: Session | None = None
    every = list(range(len(encoded)))
    self._batches = [every[i : i + batch] for i in range(0, len(every), batch)]

  def _session(self, shape: Shape, rule: str) -> Session:
    made = self._make(shape, self.rules[rule])
    if self._baseline:
      made.share_baseline(self._baseline)
    return made

  def _rows(self, members) -> list[Sequence[int]]:
    return [self._encoded[i] for i in members]

  def ranks(self, siblings: str) -> list[float]:
    """How often the r-th of many siblings is kept."""
    star = draft_shape.static(draft_tree.parallel(_RANKS, 1), siblings)
    session = self._session(
      Shape(_RANKS, "", siblings, 1, star, ()), "rejection"
    )
    with terminal.progress(f"counting acceptance by rank, {siblings}"):
      found = expected_acceptance.acceptance_by_rank(session, self._encoded)
    return (found / max(1.0, found.sum())).tolist()  # float32 may say 1 + 1e-7

  def expected(self, shape: Shape) -> dict[str, dict]:
    """By rule: expected accepted tokens, and tokens a pass over rejection's.

    Rejection writes the text, so a lossy rule is evaluated on the target's own.
    """
    session = self._session(shape, "rejection")
    judges = [session.rule, *(self.rules[rule] for rule in shape.rules)]
    what = f"counting expected tokens, {shape.name} of {shape.size}"
    with terminal.progress(what):
      sums, rounds = expected_acceptance.expected_lengths(
        session, self._encoded, judges
      )
    token, *sums = sums

    def estimate(over, under):
      known = np.all(np.isfinite(over)) and np.all(np.isfinite(under))
      found = metrics.ratio(over, under) if known else metrics.Estimate(None)
      return dataclasses.asdict(found)

    return {
      rule: {
        "expected": estimate(total, rounds),
        "gain": estimate(total + rounds, token + rounds),
      }
      for rule, total in zip(shape.rules, sums)
    }

  def loss(self, shape: Shape, rule: str, temperature: float) -> float:
    """Total variation on random tables; 0 for a lossless rule."""
    made = self.rules[rule]
    if made.lossless:
      return 0.0
    return enumeration.tabular_loss(made, shape.siblings, temperature)

  def measured(self, shape: Shape, rule: str) -> tuple[results.Run, float]:
    """Decodes every prompt both ways, in turns; and the seconds of a round."""
    session = self._session(shape, rule)
    what = f"compiling {shape.name} of {shape.size}, {rule}"
    with terminal.progress(what):
      session.warm_up(self._rows(self._batches[0]))
    self._baseline = self._baseline or session

    def decoded(batch: int, baseline: bool):
      members = self._batches[batch]
      return session.complete(self._rows(members), members, baseline)

    done = [*timing.interleaved(decoded, len(self._batches))]
    run = results.Run(
      "all",
      shape.levels,
      session.drafter.spec.max_nodes,
      session.batch,
      metrics.acceptance([one.stats for one, _ in done]),
      timing.speed(done),
      None,
    )
    rounds = sum(int(one.stats.widths.sum()) for one, _ in done)
    return run, run.speed.seconds / rounds
