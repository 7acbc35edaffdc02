"""Acceptance rules and draft shapes side by side, at equal target tokens.

Invariant: what is expected of the rules of one shape is expected of the very
same drafts; what is measured is each rule's own text, timed in turns with plain
decoding.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec import expand, probe, report, tree
from specdec.analysis import enumeration, metrics
from specdec.session import Session
from specdec.types import AcceptanceRule

EVERY = ("rejection", "naive", "coupled")
LOSSY = ("typical", "relaxed")
RULES = (*EVERY, "block", "kseq", "lenience", *LOSSY)
SHAPES = ("chain", "2 chains", "4 chains", "optimal tree", "dynamic tree")
_RANKS = 8  # siblings whose acceptance is measured


class Shape(NamedTuple):
  """Drafts of one kind, and the rules that are right for them."""

  size: int
  name: str
  siblings: str
  levels: int
  expansion: expand.Expansion | None  # None: a chain
  rules: tuple[str, ...]  # by name


def shapes_of(size: int, ranks: dict[str, Sequence[float]]) -> list[Shape]:
  """All shapes of so many guesses that can be built.

  Args:
    ranks: by kind of siblings, how often a node's r-th child is kept.
  """
  chain = (*EVERY, "block", "lenience", *LOSSY)
  found = [Shape(size, "chain", "none", size, None, chain)]

  def add(name, parents, siblings, rules):
    levels = int(tree.depth(parents).max())
    expansion = expand.static(parents, siblings)
    found.append(Shape(size, name, siblings, levels, expansion, rules))

  for count in (2, 4):
    if size % count == 0:
      parents = tree.parallel(count, size // count)
      add(f"{count} chains", parents, "iid", ("rejection", "kseq"))
      add(f"{count} chains", parents, "without_replacement", ("rejection",))
  for siblings, by_rank in ranks.items():
    rules = (
      EVERY if siblings == "without_replacement" else ("rejection", *LOSSY)
    )
    parents = tree.from_paths(tree.optimal(by_rank, size))
    add("optimal tree", parents, siblings, rules)
  levels = found[-1].levels
  top = min(4, size)
  levels = max(1, min(levels, 1 + size // top))
  expansion = expand.dynamic(
    top, levels, min(size, top + (levels - 1) * top**2)
  )
  rules = ("rejection", *LOSSY)
  found.append(
    Shape(size, "dynamic tree", "point_mass", levels, expansion, rules)
  )
  return found


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
    self._plain: Session | None = None
    every = list(range(len(encoded)))
    self._batches = [every[i : i + batch] for i in range(0, len(every), batch)]

  def _session(self, shape: Shape, rule: str) -> Session:
    made = self._make(shape, self.rules[rule])
    if self._plain:
      made.share_plain(self._plain)
    return made

  def _rows(self, members) -> list[Sequence[int]]:
    return [self._encoded[i] for i in members]

  def ranks(self, siblings: str) -> list[float]:
    """How often the r-th of many siblings is kept."""
    star = expand.static(tree.parallel(_RANKS, 1), siblings)
    session = self._session(
      Shape(_RANKS, "", siblings, 1, star, ()), "rejection"
    )
    found = probe.acceptance_by_rank(session, self._encoded)
    return [round(float(x), 4) for x in found]

  def expected(self, shape: Shape) -> dict[str, dict]:
    """By rule: expected accepted tokens, and tokens a pass over rejection's.

    Rejection writes the text, so a lossy rule is judged on the target's own.
    """
    session = self._session(shape, "rejection")
    judges = [session.rule, *(self.rules[rule] for rule in shape.rules)]
    sums, rounds = probe.expected_lengths(session, self._encoded, judges)
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

  def measured(self, shape: Shape, rule: str) -> report.Run:
    """Decodes every prompt both ways, in turns."""
    session = self._session(shape, rule)
    session.warm_up(self._rows(self._batches[0]))
    self._plain = self._plain or session
    done = []
    for turn, members in enumerate(self._batches):
      order = (False, True) if turn % 2 == 0 else (True, False)
      done.append(
        {
          plain: session.complete(self._rows(members), members, plain)
          for plain in order
        }
      )

    def column(plain, what):
      return [what(pair[plain]) for pair in done]

    def tokens(one):
      return sum(map(len, one.texts))

    def seconds(one):
      return one.seconds

    def prefill(one):
      return one.prefill_seconds

    return report.Run(
      "all",
      shape.levels,
      session.drafter.spec.max_nodes,
      session.batch,
      metrics.acceptance(column(False, lambda one: one.stats)),
      metrics.speed(
        column(False, tokens),
        column(False, seconds),
        column(True, tokens),
        column(True, seconds),
        column(False, prefill),
        column(True, prefill),
      ),
      None,
    )
