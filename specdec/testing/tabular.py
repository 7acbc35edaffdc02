"""Rules on small random tables: how far from the target, how near the optimum.

The tables have four tokens, and logits that are normal with deviation 1.5; the
draft's are unlike the target's. The draft is a chain of three, two i.i.d.
chains of two, or a tree of five draft tokens and two levels. What is said of a
rule is the mean of five pairs of tables, without top-k and top-p.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec import acceptance, draft_tree, traversal
from specdec.testing import enumeration, optimum
from specdec.types import AcceptanceRule, Draft

_SEEDS, _VOCAB_SIZE = 5, 4
_CHAIN, _CHAINS, _TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 2), (-1, 0, 0, 1, 1, 2)
_HALVINGS = 6
GAINS = (1.25, 1.5)  # accepted tokens over those of rejection


class Tabular(NamedTuple):
  """What a rule does on the tables, in one round."""

  distance: float  # total variation between what it emits, written on by the
  #                  target, and the target's distribution; nan: it shares the
  #                  target's noise, and is compared token for token elsewhere
  accepted: float  # expected accepted tokens; nan: the rule does not know
  optimum: float  # the most that a lossless rule can accept
  drafts: int  # that were enumerated, of all tables


def on_tables(
  rule: AcceptanceRule, siblings: str, temperature: float = 1.0
) -> Tabular:
  """Enumerates a rule on the tables.

  Args:
    siblings: how draft tokens are drawn, a kind of DraftSpec.siblings.

  Raises:
    ValueError: the rule is not right for such draft tokens.
  """
  if siblings not in rule.siblings:
    raise ValueError(
      f"{rule.name} is not right for siblings = {siblings!r}, only for "
      f"{', '.join(sorted(rule.siblings))}"
    )
  parents = _TREE
  if siblings == "none" or rule.chains_only:
    parents = _CHAIN
  elif siblings == "iid":
    parents = _CHAINS
  values, count = [], 0
  for drafts, target in _tables(siblings, parents, temperature):
    count += len(drafts.weight)
    if rule.traversal in enumeration.TRAVERSALS:
      outcome = enumeration.emitted(rule, drafts, target)
      exact = enumeration.text_distribution(target)
      lost = enumeration.distance(outcome.joint, exact)
      values.append((lost, outcome.accepted))
    else:
      values.append((np.nan, _expected(rule, drafts, target)))
  lost, accepted = np.mean(values, axis=0).tolist()
  most = _optimum(siblings, parents, temperature)
  return Tabular(lost, accepted, most, count)


def _tables(siblings, parents, temperature) -> Iterator[tuple]:
  """(all drafts, the target's distributions) of every pair of tables."""
  depth = int(draft_tree.depth(np.array(parents)).max())
  for seed in range(_SEEDS):
    ours, theirs = enumeration.random_distributions(
      seed, _VOCAB_SIZE, depth, temperature
    )
    yield enumeration.drafts(siblings, parents, ours), theirs


@functools.cache
def _optimum(siblings, parents, temperature) -> float:
  tables = _tables(siblings, parents, temperature)
  return float(np.mean([optimum.accepted_at_most(*pair) for pair in tables]))


def _expected(rule, drafts, target) -> float:
  """Expected accepted tokens of a rule that cannot be enumerated."""
  _, accept_prob, _ = enumeration.evaluated(rule, drafts, target)
  count = jnp.full((len(accept_prob),), accept_prob.shape[1])
  tokens, parents = jnp.asarray(drafts.tokens), jnp.asarray(drafts.parents)
  reached = traversal.TRAVERSALS[rule.traversal].prefix_acceptance(
    Draft(tokens, parents, None, count),
    jnp.asarray(accept_prob, jnp.float32),
    int(draft_tree.depth(drafts.parents).max()),
  )
  return float(np.sum(drafts.weight[:, None] * np.asarray(reached)))


class Exact(NamedTuple):
  """A lossless rule on the tables, by enumeration."""

  rule: str
  siblings: str
  drafts: int  # of positive probability, of all tables
  accepted: float
  optimum: float
  distance: float  # as Tabular's


def of_lossless_rules() -> list[Exact]:
  """Enumerates every lossless rule whose distribution is its own, on all kinds
  of siblings that it is right for."""
  rows = []
  for rule in (
    acceptance.rejection(),
    acceptance.block(),
    acceptance.traversal(),
    acceptance.multipath(),
    acceptance.kseq(),
    acceptance.naive(),
  ):
    for siblings in sorted(rule.siblings):
      measured = on_tables(rule, siblings)
      rows.append(
        Exact(
          rule.name,
          siblings,
          measured.drafts,
          measured.accepted,
          measured.optimum,
          measured.distance,
        )
      )
  return rows


# Lossy rules at equal accepted length.


class Family(NamedTuple):
  """Rules that differ in one number, from strict to loose."""

  name: str
  call: str  # as --acceptance has it, with {:.3g} for the number
  rule: Callable[[float], AcceptanceRule]
  strict: float
  loose: float


FAMILIES = (
  Family("lenience", "lenience({:.3g})", acceptance.lenience, 1.0, 0.01),
  Family(
    "FLy",
    "fly(1, {:.3g})",
    lambda threshold: acceptance.fly(1, threshold),
    1.2,
    0.0,
  ),
  Family(
    "typical",
    "typical({:.3g}, 1)",
    lambda epsilon: acceptance.typical(epsilon, 1.0),
    1.0,
    0.0,
  ),
  Family(
    "relaxed",
    f"relaxed({_VOCAB_SIZE}, {{:.3g}})",
    lambda margin: acceptance.relaxed(_VOCAB_SIZE, margin),
    0.0,
    1.0,
  ),
)


class Equal(NamedTuple):
  """A rule whose number is such that it accepts as much as the others."""

  gain: float  # accepted tokens over those of rejection, as wanted
  rule: str
  accepted: float | None  # expected tokens; None: it cannot accept so much
  distance: float = 0.0  # total variation, as in Tabular
  divergence: float = 0.0  # KL(emitted || target) of those texts, in nats
  surprise: float = 0.0  # nats by which the target finds them less likely than
  #                        its own, on average


class _Measured(NamedTuple):
  accepted: float
  joints: np.ndarray  # [tables, V, V, ...] of the texts


@functools.cache
def _measured(rule: AcceptanceRule) -> _Measured:
  outcomes = [
    enumeration.emitted(rule, *pair) for pair in _tables("none", _CHAIN, 1.0)
  ]
  joints = np.stack([outcome.joint for outcome in outcomes])
  return _Measured(float(np.mean([x.accepted for x in outcomes])), joints)


def at_equal_length() -> list[Equal]:
  """Compares lossy rules that accept equally many tokens of chains.

  The number of each is halved in; what remains between two neighbours, as rules
  of certainties jump, is made up by a coin that takes the one or the other in
  every round, which is a rule, too.

  Returns:
    For every gain of GAINS the rules of FAMILIES, and what lossless rules are.
  """
  exact = np.stack([
    enumeration.text_distribution(target)
    for _, target in _tables("none", _CHAIN, 1.0)
  ])  # fmt: skip
  strict = _measured(acceptance.rejection()).accepted
  block = _measured(acceptance.block()).accepted
  rows = [
    Equal(1.0, "rejection", strict), Equal(block / strict, "block", block)
  ]  # fmt: skip
  for gain in GAINS:
    for family in FAMILIES:
      rows.append(_equal(family, gain, gain * strict, exact))
  return rows


def _equal(family: Family, gain: float, goal: float, exact) -> Equal:
  low, high = family.strict, family.loose
  if _measured(family.rule(high)).accepted < goal:
    return Equal(gain, family.name, None)
  for _ in range(_HALVINGS):
    middle = (low + high) / 2
    if _measured(family.rule(middle)).accepted < goal:
      low = middle
    else:
      high = middle
  under, over = (_measured(family.rule(value)) for value in (low, high))
  apart = over.accepted - under.accepted
  share = (goal - under.accepted) / apart if apart else 1.0
  share = min(max(share, 0.0), 1.0)  # a strict end that accepts too much
  joint = share * over.joints + (1 - share) * under.joints
  some = joint > 0
  log_exact = np.log(np.where(some, exact, 1.0))
  log_joint = np.log(np.where(some, joint, 1.0))
  tables = len(exact)
  ours = np.sum(joint * log_exact)  # a log-likelihood
  theirs = np.sum(exact * np.log(exact))
  return Equal(
    gain,
    family.call.format(high if share > 0.5 else low),
    share * over.accepted + (1 - share) * under.accepted,
    float(np.abs(joint - exact).sum() / 2 / tables),
    float(np.sum(joint * (log_joint - log_exact)) / tables),
    float((theirs - ours) / tables),
  )
