"""Rules that keep more than the target's distribution allows, and say so.

What each of them changes can be stated: lenience bounds every token's
probability, typical and relaxed acceptance keep what is likely enough under the
target, FLy what the tokens after it agree with. All of them read warped
distributions: at temperature 0 they are greedy.
"""

import jax
import jax.numpy as jnp

from specdec import sampling
from specdec.acceptance.distributions import (
  prob_of_tokens,
  ratio,
  target_residual,
)
from specdec.acceptance.rejection import rejection
from specdec.types import SIBLINGS, AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached

_MOST_LIKELY = 64  # tokens whose entropy is taken, one search after another


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
    return (rank < min(top, probs.shape[-1])) & near & (drafted[:, 0] > 0)

  return _by_likelihood(
    "relaxed",
    likely,
    f"lossy: any of the {top} likeliest tokens within {margin:g}",
  )


@cached
def fly(
  window: int = 2, threshold: float = 0.3, top: int = 3
) -> AcceptanceRule:
  """Keeps a token that rejection refuses if the `window` tokens after it agree.

  FLy (arXiv:2511.22972), as vLLM draws it: a refusal is overruled where the
  target is unsure, where it could have written the token at all, and where
  rejection accepts all of the next `window` draft tokens, which must be there;
  the token after them may be overruled again. One path only. Paper and vLLM
  have a window of 6, or k - 1 where that is less; here it is a number, as a
  row's text must not depend on the width that its neighbours need. At
  temperature 0 the warped distribution is sure of itself, and nothing is
  overruled.

  Args:
    window: draft tokens that must be accepted after the refused one, >= 1.
    threshold: entropy of the target's likeliest tokens, in nats, from which on
      it counts as unsure: minus the sum of p log p.
    top: of so many tokens, 1 to 64.

  Raises:
    ValueError: an argument is out of range.
  """
  for name, value in (("window", window), ("top", top)):
    if not value >= 1 or value % 1:
      raise ValueError(f"{name} = {value}; it must be a whole number >= 1")
  if top > _MOST_LIKELY:
    raise ValueError(f"top = {top}; it must be in 1..{_MOST_LIKELY}")
  if not threshold >= 0:
    raise ValueError(f"threshold = {threshold:g}; it must be >= 0")
  window, top, strict = int(window), int(top), rejection()

  def unsure(log_probs: Array) -> Array:
    """[N] whether the target is, after each node."""
    _, likeliest = sampling.top(log_probs, min(top, log_probs.shape[1]))
    terms = jnp.exp(likeliest) * jnp.where(likeliest > -jnp.inf, likeliest, 0.0)
    return -jnp.sum(terms, axis=1) >= threshold

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    num_nodes = len(target_log_probs)
    node = jnp.arange(num_nodes)
    used = node < draft.count
    native = strict.accept_prob(draft, target_log_probs)
    native = jnp.where(used & (node > 0), native, 0.0)
    agree = jnp.ones(num_nodes)  # the next `window` nodes are accepted
    # A node has no more than num_nodes - 1 others after it.
    for step in range(1, min(window, num_nodes) + 1):
      agree *= jnp.concatenate([native[step:], jnp.zeros(step)])
    likely = prob_of_tokens(draft, target_log_probs) > 0
    above = jnp.maximum(node - 1, 0)
    overruled = jnp.where(unsure(target_log_probs)[above] & likely, agree, 0.0)

    def visit(last: Array, carry):
      """Splits the probability of coming to a node: further, or no further."""
      reach, ends = carry
      child = last + 1
      refused = jnp.where(child < draft.count, 1.0 - native[child], 0.0)
      onward = jnp.where(child < draft.count, native[child], 0.0)
      over = jnp.where(child < draft.count, overruled[child], 0.0)
      here = reach[last]
      reach = reach.at[child].add(here * onward)
      behind = jnp.minimum(child + min(window, num_nodes), num_nodes)
      reach = reach.at[behind].add(here * refused * over)
      whole = child >= draft.count  # nothing is left to refuse
      stop = jnp.where(whole, here, here * refused * (1.0 - over))
      return reach, ends.at[last].set(stop)

    reach = jnp.zeros(num_nodes + 1).at[0].set(1.0)
    _, ends = jax.lax.fori_loop(
      0, num_nodes, visit, (reach, jnp.zeros(num_nodes))
    )
    # The last node that is accepted, given that none after it is.
    up_to = jnp.cumsum(ends)
    return jnp.where(up_to > 0, ends / jnp.where(up_to > 0, up_to, 1.0), 0.0)

  return strict._replace(
    accept_prob=accept_prob,
    traversal="last_success",
    siblings=frozenset({"none", "deterministic"}),
    lossless=False,
    chains_only=True,
    name="fly",
    caveat=f"lossy: FLy keeps a refused token where the target is unsure and "
    f"the next {window} are accepted",
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
