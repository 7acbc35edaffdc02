"""Samples a draft with a decoder's passes, whole or in part."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec import draft_shape, draft_tree
from specdec.draft_shape import LengthPolicy
from specdec.types import Array, Context, Draft, KVCache


def sample_model(
  context: Context,
  shape: draft_shape.DraftShape,
  apply: Callable,
  cache: KVCache,
  *,
  logits: Array | None = None,
  streams: Array | None = None,
  run_leaves: bool = False,
  policy: LengthPolicy | None = None,
) -> tuple[Draft, Array | None, KVCache, Array | None]:
  """Draws a chain in a loop of one token a pass, a tree in one pass a level.

  Args:
    apply: `Model.apply` of given weights.
    cache: its scratch takes the nodes that are run.
    logits: [B, V] after the pending token; None: it is run first.
    streams: [B, N, M], filled with the first features of the nodes.
    run_leaves: leaves of a chain or a static tree are run too.
    policy: of how long a chain becomes; default the shape's.

  Returns:
    The draft; SampledTree.slot, None of a chain; cache and streams.
  """

  def run(carry, tokens, node, **options):
    cache, streams = carry
    output, cache = apply(tokens, cache, **options)
    if streams is not None:
      streams = jax.lax.dynamic_update_slice_in_dim(
        streams, output.features[0], node, axis=1
      )
    return (cache, streams), output.logits

  def extend_chain(carry, token, node):
    (cache, streams), logits = run(carry, token, node)
    cache = cache.replace(length=cache.length + 1)  # no longer scratch
    return (cache, streams), logits[:, 0]

  def extend_tree(carry, tokens, parents, first, need_logits):
    options = {"parents": parents, "first": first, "head": need_logits}
    return run(carry, tokens, first, **options)

  carry, slot = (cache, streams), None
  if shape.loops:
    leaf, policy = shape.spec.max_depth, policy or shape.policy
    draft, carry = draft_shape.sample_chain(
      context, leaf, extend_chain, carry, logits=logits, policy=policy
    )
    if run_leaves:  # rows that are shorter had theirs run on the way
      if policy is not None:
        leaf = jnp.max(carry[0].length - cache.length)  # nodes that were run
      token = jax.lax.dynamic_slice_in_dim(draft.tokens, leaf, 1, axis=1)
      carry, _ = run(carry, token, leaf, head=False)
  else:
    if logits is None:
      root = context.pending, draft_tree.chain(1), 0, True
      carry, after = extend_tree(carry, *root)
      logits = after[:, 0]
    (draft, slot), carry = shape.sample_tree(
      context, logits, extend_tree, carry, run_leaves
    )
  return draft, slot, *carry
