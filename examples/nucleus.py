"""A lossy acceptance rule: keeps a token that lies in the target's nucleus.

specdec.load(..., acceptance="examples/nucleus.py:nucleus(mass=0.8)")
"""

import jax.numpy as jnp

from specdec.types import SIBLINGS, AcceptanceRule


def nucleus(mass=0.8):
  """Accepts a token if the likelier ones together have less than `mass`.

  Args:
    mass: in (0, 1].
  """
  if not 0 < mass <= 1:
    raise ValueError(f"mass = {mass:g}; it must be in (0, 1]")

  def accept_prob(draft, target_log_probs):
    parents = jnp.maximum(jnp.asarray(draft.parents), 0)
    probs = jnp.exp(target_log_probs[parents])  # [N, V]
    drafted = jnp.take_along_axis(probs, draft.tokens[:, None], axis=-1)
    likelier = jnp.sum(jnp.where(probs > drafted, probs, 0.0), axis=-1)
    kept = (likelier < mass) & (drafted[:, 0] > 0)
    return kept.astype(jnp.float32)

  def residual(draft, target_log_probs, node):
    return jnp.exp(target_log_probs[node])

  return AcceptanceRule(
    accept_prob,
    residual,
    traversal="longest",
    siblings=frozenset(SIBLINGS),
    lossless=False,
    caveat=f"lossy: any token of the target's nucleus of mass {mass:g}",
    name="nucleus",
  )
