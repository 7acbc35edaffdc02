"""Early exit: the target's first layers draft, verification goes on from there.

After layer E the residual stream goes through the target's final norm and head
(LayerSkip, arXiv:2404.16710; Draft & Verify, arXiv:2309.08168, skips layers
elsewhere). Invariant: the first E layers run once for every node, the last one
included; their KV lies in the target's cache and the streams that leave them
are handed over, so that verification runs layers E to L - 1 alone.

A round of k chained draft tokens costs (k + 1) E layers of one token each, k
heads, and L - E layers of k + 1 tokens. Against an independent draft there is
no second set of weights and no second cache. Layers that were never trained to
predict by themselves draft badly: without such training this is usually slower
than the autoregressive baseline (docs/results/smollm2.md).
"""

import jax
import jax.numpy as jnp

from specdec import draft_shape
from specdec.drafters.sample_model import sample_model
from specdec.types import Context, Drafter, DrafterCost, Model, Resume
from specdec.utils.constructors import cached


@cached
def early_exit(
  target: Model,
  exit_layer: int,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with layers 0 .. exit_layer - 1 of the target itself.

  Its draft tokens are drawn from the warped distribution that it hands over,
  under the sampling settings of the row. It has no weights and no state of its
  own. A chain and a static tree are resumed after layer E; a dynamic tree is
  run again from the first layer on: its nodes stand in another order than they
  were tried in, and its leaves were never run.

  Args:
    target: the very model that verifies.
    exit_layer: E, in 1 .. L - 1: how many layers draft.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: E or k is out of range; both or neither of k and shape are
      given; or drafting would run more nodes than the tree has: they share the
      target's scratch slots.
  """
  if not 1 <= exit_layer < target.num_layers:
    raise ValueError(
      f"exit_layer = {exit_layer}; this target has {target.num_layers} layers, "
      f"so it must be in 1..{target.num_layers - 1}"
    )
  shape = draft_shape.resolve(k, shape)
  draft_shape.check_scratch(shape)
  depth = shape.spec.max_depth

  def propose(params, draft_state, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), draft_state

    def apply(tokens, cache, **options):
      options |= {"stop": exit_layer, "features": (exit_layer,)}
      return target.apply(params.target, tokens, cache, **options)

    whole = context.target_cache
    cache = whole.replace(layers=whole.layers[:exit_layer])
    streams = None
    if shape.in_place:
      one = jax.eval_shape(lambda: apply(context.pending, cache)[0].features[0])
      streams = jnp.zeros(
        (len(one), shape.spec.max_nodes, one.shape[-1]), one.dtype
      )
    draft, _, cache, streams = sample_model(
      context, shape, apply, cache, streams=streams, run_leaves=True
    )
    return draft._replace(resume=Resume(streams, cache.layers)), draft_state

  cost = DrafterCost(exit_layer=exit_layer)
  spec, idle = shape.spec._replace(name="early_exit"), draft_shape.idle(shape)
  return Drafter(spec, lambda *_: None, propose, lambda *_: None, cost, idle)
