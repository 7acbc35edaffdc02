"""Samples a draft with a decoder's passes, whole or in part."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec import draft_shape, draft_tree
from specdec.draft_shape import LengthPolicy
from specdec.models.attention import BLOCK
from specdec.types import (
  ANY_CHAIN,
  Array,
  Context,
  Draft,
  Drafter,
  KVCache,
  Params,
  Resume,
  Sparse,
)


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


def check_positions(positions: Sparse) -> None:
  """Raises ValueError for no window, or for sinks that no block has."""
  for name, least, most in (("window", 1, 2**30), ("sinks", 0, BLOCK)):
    value = getattr(positions, name)
    if type(value) is not int or not least <= value <= most:
      raise ValueError(f"{name} = {value}; it must be in {least}..{most:,}")


def in_scratch(
  name: str,
  shape: draft_shape.DraftShape,
  apply_of: Callable[[Params], Callable],
) -> Drafter:
  """Returns a drafter of the target's passes in the target's scratch slots.

  It has no state: verification overwrites what it writes.

  Args:
    apply_of: returns `Model.apply` of given weights.

  Raises:
    ValueError: drafting would run more nodes than the tree has.
  """
  draft_shape.check_scratch(shape)
  external = ANY_CHAIN if shape.spec.chain else 0
  spec = shape.spec._replace(name=name, max_external_drafts=external)

  def propose(params: Params, draft_state, context: Context):
    if spec.max_depth == 0:
      return draft_shape.pending_only(context), draft_state
    draft, _, cache, _ = sample_model(
      context, shape, apply_of(params), context.target_cache
    )
    return draft._replace(resume=Resume(None, cache.layers)), draft_state

  idle = draft_shape.idle(shape)
  return Drafter(spec, lambda *_: None, propose, lambda *_: None, idle=idle)
