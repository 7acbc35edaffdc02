"""Rules that keep more than the target's distribution allows, and say so.

What each of them changes can be stated: lenience bounds every token's
probability, typical and relaxed acceptance keep what is likely enough under the
target. All of them read warped distributions: at temperature 0 they are greedy.
"""

import jax.numpy as jnp

from specdec.acceptance.distributions import (
  prob_of_tokens,
  ratio,
  target_residual,
)
from specdec.acceptance.rejection import rejection
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


@cached
def lenience(share: float = 0.5) -> AcceptanceRule:
  """Keeps x with probability min(1, p(x) / (share q(x))): one path only.

  Leviathan et al. (arXiv:2211.17192), section 5.1, l there. After the tokens
  before it, no token comes with more than 1 / share times its probability.

  Args:
    share: l, in (0, 1]; 1 is rejection.
  """
  if not 0 < share <= 1:
    raise ValueError(f"share = {share:g}; it must be in (0, 1]")

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    return ratio(draft, prob_of_tokens(draft, target_log_probs) / share)

  # What follows a refusal is drawn as under rejection: norm(relu(p - q)).
  strict = rejection()._replace(
    siblings=frozenset({"none", "deterministic"}),
    chains_only=True,
    name="lenience",
  )
  if share == 1:
    return strict
  return strict._replace(
    accept_prob=accept_prob,
    lossless=False,
    caveat=f"lossy: a token may come up to {1 / share:g} times as often as the "
    "target says",
  )


@cached
def typical(epsilon: float = 0.09, delta: float = 0.3) -> AcceptanceRule:
  """Keeps x where p(x) > min(epsilon, delta exp(-H(p))), the longest path.

  Medusa (arXiv:2401.10774), section 2.3.1, whose code has the two numbers the
  other way round; the paper takes delta = sqrt(epsilon). H is the entropy of
  the target's distribution, in nats. What follows the path is drawn from the
  target.

  Args:
    epsilon: a token of more than this probability is always kept.
    delta: the share of exp(-H) that is asked for where the distribution is
      flat.
  """
  for name, value in (("epsilon", epsilon), ("delta", delta)):
    if not 0 <= value <= 1:
      raise ValueError(f"{name} = {value:g}; it must be in [0, 1]")

  def likely(log_probs: Array, token: Array) -> Array:
    probs = jnp.exp(log_probs)
    terms = jnp.where(probs > 0, probs * log_probs, 0.0)
    floor = jnp.minimum(epsilon, delta * jnp.exp(jnp.sum(terms, axis=-1)))
    return jnp.take_along_axis(probs, token[:, None], axis=-1)[:, 0] > floor

  return _by_likelihood(
    "typical",
    likely,
    f"lossy: typical acceptance, epsilon {epsilon:g}, delta {delta:g}",
  )


@cached
def relaxed(top: int = 10, margin: float = 0.6) -> AcceptanceRule:
  """Keeps the target's `top` likeliest tokens within `margin` of the first.

  As TensorRT-LLM's relaxed acceptance does for reasoning models. What follows
  the path is drawn from the target.

  Args:
    top: how many tokens, >= 1; equally likely ones share a rank.
    margin: p(x) >= max p - margin, in [0, 1].
  """
  if not top >= 1 or top % 1:
    raise ValueError(f"top = {top}; it must be a whole number >= 1")
  if not 0 <= margin <= 1:
    raise ValueError(f"margin = {margin:g}; it must be in [0, 1]")

  def likely(log_probs: Array, token: Array) -> Array:
    probs = jnp.exp(log_probs)
    drafted = jnp.take_along_axis(probs, token[:, None], axis=-1)
    rank = jnp.sum(probs > drafted, axis=-1)
    near = drafted[:, 0] >= jnp.max(probs, axis=-1) - margin
    return (rank < top) & near & (drafted[:, 0] > 0)

  return _by_likelihood(
    "relaxed",
    likely,
    f"lossy: any of the {top} likeliest tokens within {margin:g}",
  )


def _by_likelihood(name: str, likely, caveat: str) -> AcceptanceRule:
  """A rule of certainties: likely(log_probs [N, V], tokens [N]) -> [N]."""

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    above = jnp.maximum(jnp.asarray(draft.parents), 0)
    accepted = likely(target_log_probs[above], draft.tokens)
    return accepted.astype(jnp.float32)

  return AcceptanceRule(
    accept_prob,
    target_residual,
    "longest",
    frozenset(SIBLINGS),
    lossless=False,
    caveat=caveat,
    name=name,
  )
