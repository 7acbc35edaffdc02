"""Distributions for tests: random ones, and what a rule makes of them.

specdec/testing/enumeration.py enumerates; here are the distributions that are
tried, the lies that a drafter may tell, and expected lengths in closed form.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling
from specdec.testing import enumeration
from specdec.testing.enumeration import Outcome, log, text_distribution, without
from specdec.types import AcceptanceRule, Draft

__all__ = ["Draft", "Outcome", "log", "text_distribution", "without"]

KINDS = ("none", "iid", "without_replacement", "deterministic")


def random_logits(seed: int, vocab_size: int, length: int, scale=1.5):
  """Logits of a random distribution over texts of `length` tokens, float32."""
  rng = np.random.default_rng(seed)
  return [
    (scale * rng.normal(size=(vocab_size,) * (d + 1))).astype(np.float32)
    for d in range(length)
  ]


_warp = jax.jit(sampling.warp)


def warp(logits, temperature=1.0, top_k=None, top_p=None):
  """The distribution of these logits under specdec's own warp, float64."""
  vocab_size = logits[0].shape[-1]
  flat = np.concatenate([level.reshape(-1, vocab_size) for level in logits])
  size = max(128, len(flat))  # one shape for all, so that it compiles once
  padded = np.zeros((size, vocab_size), np.float32)
  padded[: len(flat)] = flat
  settings = sampling.settings(size, temperature, top_k, top_p)
  distribution = np.exp(np.asarray(_warp(jnp.asarray(padded), settings), float))
  distribution = distribution[: len(flat)] / distribution[: len(flat)].sum(
    -1, keepdims=True
  )
  ends = np.cumsum([level.size // vocab_size for level in logits])
  return [
    part.reshape(level.shape)
    for part, level in zip(np.split(distribution, ends[:-1]), logits)
  ]


def depths(parents) -> np.ndarray:
  """[N] depth of every node, in plain Python."""
  depth = [0]
  for parent in parents[1:]:
    depth.append(depth[parent] + 1)
  return np.array(depth)


def emitted(
  rule: AcceptanceRule,
  parents,
  kind: str,
  draft_distributions,
  target_distributions,
  *,
  said="truth",
  count: int | None = None,
  joined: bool = True,
  **options,
) -> Outcome:
  """What `rule` makes of every draft that can be drawn.

  Args:
    parents: [N], level order.
    kind: how the children of a node are drawn, one of KINDS.
    draft_laws: distribution[d] for d < D, what the tokens are really drawn
      from.
    target_laws: distribution[d] for d <= D.
    said: 'truth': the drafter hands over what it drew from; None: nothing (a
      deterministic draft); or other distributions, said in their place: a lie.
    count, joined, options: as in enumeration.drafts and emitted.
  """
  found = enumeration.drafts(
    kind, parents, draft_distributions, count=count, joined=joined
  )
  if said is None:
    found = found._replace(drawn=None)
  elif not isinstance(said, str):
    drawn = found.drawn.copy()
    for m, row in enumerate(found.tokens):
      for node in range(1, len(parents) if count is None else count):
        drawn[m, node] = enumeration.distribution_of_node(
          "none", parents, node, row, said
        )
    found = found._replace(drawn=drawn)
  return enumeration.emitted(
    rule, found, target_distributions, count=count, **options
  )


def error(outcome: Outcome, target_distributions) -> float:
  """Largest difference of the emitted joint distribution from the target's."""
  exact = text_distribution(target_distributions[: outcome.joint.ndim])
  return float(np.abs(outcome.joint - exact).max())


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
