"""Random distributions over texts, and what a rule makes of them, exactly.

specdec/testing/enumeration.py enumerates drafts; here are the distributions
that are tried, false claims of a drafter, and accepted lengths in closed form.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, draft_tree, sampling
from specdec.testing import enumeration
from specdec.testing.enumeration import Outcome, text_distribution
from specdec.types import AcceptanceRule

EXACT = 1e-6  # most error of an honest rule
PLANTED = 1e-3  # least error of a planted bug

CHAINS = {k: [-1, *range(k)] for k in (1, 2, 3)}
PAIR = [-1, 0, 0]
TRIPLE = [-1, 0, 0, 0]
DEEP = [-1, 0, 0, 1, 1, 2]
SIBLINGS = ("iid", "without_replacement", "deterministic")
WARPS = {
  "baseline": {},
  "greedy": {"temperature": 0.0},
  "top_p": {"top_p": 0.6},
  "all": {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
}


def max_depth(parents) -> int:
  """Depth of the deepest node."""
  return int(draft_tree.depth(np.array(parents)).max())


def random_logits(seed: int, vocab_size: int, length: int):
  """Logits of a random distribution over texts of `length` tokens, float32."""
  rng = np.random.default_rng(seed)
  return [
    (1.5 * rng.normal(size=(vocab_size,) * (d + 1))).astype(np.float32)
    for d in range(length)
  ]


_warp = jax.jit(sampling.warp)


def warp(logits, temperature=1.0, top_k=None, top_p=None):
  """The distribution of these logits under specdec's warp, float64."""
  vocab_size = logits[0].shape[-1]
  flat = np.concatenate([level.reshape(-1, vocab_size) for level in logits])
  size = max(128, len(flat))  # one shape for all, so that it compiles once
  padded = np.zeros((size, vocab_size), np.float32)
  padded[: len(flat)] = flat
  settings = sampling.settings(size, temperature, top_k, top_p)
  distribution = np.exp(np.asarray(_warp(jnp.asarray(padded), settings), float))
  distribution = distribution[: len(flat)]
  distribution /= distribution.sum(-1, keepdims=True)
  ends = np.cumsum([level.size // vocab_size for level in logits])
  return [
    part.reshape(level.shape)
    for part, level in zip(np.split(distribution, ends[:-1]), logits)
  ]


def distributions(vocab_size, length, name="baseline", seed=0):
  """(draft, target) distributions of random texts, warped alike."""
  draft = random_logits(seed, vocab_size, length)
  target = random_logits(seed + 100, vocab_size, length + 1)
  return warp(draft, **WARPS[name]), warp(target, **WARPS[name])


def flat(row, length: int):
  """A distribution over texts whose every token is drawn from `row`."""
  row = np.array(row, float)
  return [
    np.broadcast_to(row, (len(row),) * d + row.shape) for d in range(length)
  ]


def emitted(
  rule: AcceptanceRule,
  parents,
  kind: str,
  draft_distributions,
  target_distributions,
  *,
  claimed="truth",
  count: int | None = None,
  joined: bool = True,
  **options,
) -> Outcome:
  """What `rule` makes of every draft that can be drawn.

  Args:
    parents, kind, count, joined: as in enumeration.drafts.
    draft_distributions: what the tokens are really drawn from.
    claimed: 'truth': the drafter hands over what it drew from; None: nothing (a
      deterministic draft); or other distributions in their place.
    options: as in enumeration.emitted.
  """
  drafts = enumeration.drafts(
    kind, parents, draft_distributions, count=count, joined=joined
  )
  if claimed is None:
    drafts = drafts._replace(drawn=None)
  elif claimed != "truth":
    drawn = drafts.drawn.copy()
    for m, row in enumerate(drafts.tokens):
      for node in range(1, len(parents)):
        drawn[m, node] = enumeration.distribution_of_node(
          "none", parents, node, row, claimed
        )
    drafts = drafts._replace(drawn=drawn)
  return enumeration.emitted(
    rule, drafts, target_distributions, count=count, **options
  )


def error(outcome: Outcome, target_distributions) -> float:
  """Largest difference of the emitted joint distribution from the target's."""
  exact = text_distribution(target_distributions[: outcome.joint.ndim])
  return float(np.abs(outcome.joint - exact).max())


def check(rule, parents, kind, draft, target, **options) -> Outcome:
  """`emitted`, which must have the target's distribution."""
  outcome = emitted(rule, parents, kind, draft, target, **options)
  assert error(outcome, target) < EXACT
  return outcome


def planted(parents, kind, draft, target, rule=None, **options) -> float:
  """The error of a rule or drafter with a planted bug."""
  rule = rule or acceptance.rejection()
  return error(emitted(rule, parents, kind, draft, target, **options), target)


def block_acceptance(draft_distributions, target_distributions) -> float:
  """Expected accepted tokens of a chain under block verification.

  The sum over prefixes of their draft probability times the running ratio of
  the two distributions, clipped at 1 after every token (arXiv:2403.10444).
  """
  draft, w, total = np.ones(()), np.ones(()), 0.0
  for drawn, distribution in zip(draft_distributions, target_distributions):
    draft = draft[..., None] * drawn
    with np.errstate(divide="ignore", invalid="ignore"):
      ratio = np.where(drawn > 0, w[..., None] * distribution / drawn, 0.0)
    w = np.minimum(1.0, ratio)
    total += float(np.sum(draft * w))
  return total


def chain_acceptance(draft_distributions, target_distributions) -> float:
  """Expected accepted tokens of a chain under rejection, in closed form.

  Token l is accepted with the sum over texts of prod min(target, draft).
  """
  shared = [
    np.minimum(d, t) for d, t in zip(draft_distributions, target_distributions)
  ]
  return sum(
    text_distribution(shared[: d + 1]).sum() for d in range(len(shared))
  )
