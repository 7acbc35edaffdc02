"""Checks that an acceptance rule keeps what decoding relies on.

For whoever adds one: `check_rule` enumerates it on small tables and raises
AssertionError with a sentence that names it and the invariant that it breaks.
"""

import itertools
from collections.abc import Sequence

import jax
import numpy as np

from specdec import draft_tree
from specdec.testing import enumeration
from specdec.testing.books import Broken, require
from specdec.types import AcceptanceRule

RULE_INVARIANTS = {
  "caveat": "a rule that is not lossless says so in its caveat, and no other",
  "traced": "it can be traced, with a tree that is constant or an argument",
  "probability": "accept_prob lies in [0, 1]",
  "residual": "residual is a distribution",
  "unused": "nodes that are not in use change nothing",
  "distribution": "text has the target's distribution if it is lossless",
}

_EXACT = 1e-5
_CHAIN, _TREE = (-1, 0, 1), (-1, 0, 0, 1, 1, 2)  # enumerated for rules
_CHAINS = (-1, 0, 0, 1, 2)
_UNTRACEABLE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerIntegerConversionError,
)


def check_rule(
  rule: AcceptanceRule, *, temperatures: Sequence[float] = (1.0, 0.0)
) -> None:
  """Checks the RULE_INVARIANTS of an acceptance rule, by enumeration.

  Every draft over three tokens is enumerated, for each kind of siblings and
  each shape that the rule says it is right for, under distributions that are
  random, that have zeros and that have nothing in common. A rule of traversal
  'coupled' has no distribution of its own: of it the probabilities are checked,
  and `check_drafter` compares its text with autoregressive decoding's.

  Args:
    temperatures: at which the rule is right; (0.0,) for one that is greedy.

  Raises:
    AssertionError: names the rule and the first invariant that it breaks.
  """
  try:
    require(
      rule.lossless == (not rule.caveat),
      f"lossless = {rule.lossless} and caveat = {rule.caveat!r}",
      "caveat",
    )
    lost = [_lost(rule, *case) for case in _cases(rule, temperatures)]
    require(
      rule.lossless or 1e-3 < max(lost) <= 1,
      "it is not lossless, and nothing is lost on any table",
      "distribution",
    )
  except Broken as broken:
    sentence, name = broken.args
    raise AssertionError(
      f"{rule.name} breaks {name!r} ({RULE_INVARIANTS[name]}): {sentence}"
    ) from None


def _shapes(rule: AcceptanceRule) -> list[tuple[str, tuple[int, ...]]]:
  """(kind of siblings, parents) of drafts that the rule is right for."""
  shapes = [(kind, _CHAIN) for kind in ("none", "deterministic")]
  if not rule.chains_only:
    chains = _CHAINS if rule.most_chains else _TREE
    shapes += [("iid", chains)]
    shapes += [
      (kind, _TREE) for kind in ("without_replacement", "deterministic")
    ]
  return [shape for shape in shapes if shape[0] in rule.siblings]


def _table_pairs(depth: int, temperature: float):
  """(draft's, target's) distributions of `depth` and one more tokens."""
  for seed in range(2):
    yield enumeration.random_distributions(seed, 3, depth, temperature)
  if temperature == 0:
    return
  for draft, target in (
    ([0.5, 0.5, 0.0], [0.0, 0.3, 0.7]),
    ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),  # nothing in common
    ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
  ):
    yield [
      [np.broadcast_to(row, (3,) * (d + 1)) for d in range(size)]
      for row, size in ((draft, depth), (target, depth + 1))
    ]


def _cases(rule: AcceptanceRule, temperatures):
  """(where, drafts, target's distributions, nodes in use) to enumerate."""
  for (kind, parents), temperature in itertools.product(
    _shapes(rule), temperatures
  ):
    depth = int(draft_tree.depth(np.array(parents)).max())
    pairs = list(_table_pairs(depth, temperature))
    for number, (draft, target) in enumerate(pairs):
      # Fewer nodes in use, too, with the first tables.
      for count in range(
        len(parents), 0 if number == 0 else len(parents) - 1, -1
      ):
        where = (
          f"siblings {kind!r}, parents {parents}, {count} nodes in use, "
          f"temperature {temperature:g}, tables {number}"
        )
        drafts = enumeration.drafts(kind, parents, draft, count=count)
        yield where, drafts, target, count


def _lost(rule, where, drafts, tables, count) -> float:
  """Total variation from the target's distribution, everything checked."""

  def check(holds, name, sentence):
    require(holds, f"{where}: {sentence}", name)

  def run(function, **options):
    try:
      return function(rule, drafts, tables, count=count, **options)
    except _UNTRACEABLE as error:
      return check(False, "traced", str(error).splitlines()[0])

  _, accept_prob, residual = run(enumeration.evaluated)
  accept_prob = accept_prob[:, 1:]  # the root's means nothing
  allowed = (accept_prob >= 0) & (accept_prob <= 1 + 1e-6)
  if rule.traversal == "coupled" and drafts.drawn is not None:
    allowed |= np.isnan(accept_prob)  # siblings that share noise
  check(np.all(allowed), "probability", f"it is {accept_prob[~allowed][:1]}")
  if rule.traversal == "coupled":
    return 0.0
  check(np.all(residual >= 0), "residual", "it is negative somewhere")
  joint = run(enumeration.emitted).joint
  check(
    abs(joint.sum() - 1) < _EXACT,
    "residual",
    f"the probabilities of all texts add up to {joint.sum():.6f}",
  )
  size = drafts.tokens.shape[1]
  others = [] if count == size else [{"rubbish": -np.inf}, {"rubbish": np.nan}]
  if draft_tree.max_siblings(drafts.parents[0]) > 1:
    others.append({"traced": True})
  for options in others:
    other = run(enumeration.emitted, **options).joint
    check(
      np.allclose(other, joint, atol=_EXACT),
      "traced" if "traced" in options else "unused",
      "it gives another distribution",
    )
  exact = enumeration.text_distribution(tables)
  lost = enumeration.distance(joint, exact)
  check(
    not rule.lossless or lost < _EXACT,
    "distribution" if count == size else "unused",
    f"total variation from the target's is {lost:.6f}",
  )
  return lost
