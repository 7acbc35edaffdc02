"""Naive match: sample the target's token, accept where it is the drafted one.

The baseline of every comparison. It reads nothing of the draft's distribution,
so it is right for any drafter, and keeps least. In this form (accept with the
target's probability of the token, else draw from the others) it is recursive
rejection of point masses.
"""

from specdec.acceptance.rejection import rejection
from specdec.types import AcceptanceRule, Array, Draft
from specdec.utils.constructors import cached


@cached
def naive() -> AcceptanceRule:
  """The rule above, for chains and trees."""
  rule = rejection()

  def accept_prob(draft: Draft, target_log_probs: Array) -> Array:
    return rule.accept_prob(draft._replace(log_probs=None), target_log_probs)

  def residual(draft: Draft, target_log_probs: Array, node: Array) -> Array:
    draft = draft._replace(log_probs=None)
    return rule.residual(draft, target_log_probs, node)

  return rule._replace(accept_prob=accept_prob, residual=residual, name="naive")
