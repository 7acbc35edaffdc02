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
than the autoregressive baseline (docs/results/texts.md).
"""

import jax
import jax.numpy as jnp

from specdec import draft_shape, draft_tree
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

  def run(params, cache, tokens, **options):
    """Runs nodes through the first layers: logits, streams [B, T, M], cache."""
    output, cache = target.apply(
      params.target,
      tokens,
      cache,
      stop=exit_layer,
      features=(exit_layer,),
      **options,
    )
    return output.logits, output.features[0], cache

  def init(params, context, prefill_output):
    del params, context, prefill_output

  def propose_chain(params, context, cache):
    def extend(carry, token, node):
      cache, streams = carry
      logits, stream, cache = run(params, cache, token)
      cache = cache.replace(length=cache.length + 1)  # no longer scratch
      return (cache, streams.at[:, node].set(stream[:, 0])), logits[:, 0]

    stream = jax.eval_shape(lambda: run(params, cache, context.pending)[1])
    streams = jnp.zeros(
      (len(stream), depth + 1, stream.shape[-1]), stream.dtype
    )
    draft, (cache, streams) = draft_shape.sample_chain(
      context, depth, extend, (cache, streams)
    )
    _, stream, cache = run(params, cache, draft.tokens[:, -1:], head=False)
    return draft, cache, streams.at[:, -1:].set(stream)

  def propose_tree(params, context, cache):
    def extend(carry, tokens, parents, first, need_logits):
      cache, streams = carry
      logits, stream, cache = run(
        params, cache, tokens, parents=parents, first=first, head=need_logits
      )
      return (cache, (*streams, stream)), logits

    carry, logits = extend(
      (cache, ()), context.pending, draft_tree.chain(1), 0, True
    )
    tree, (cache, streams) = shape.sample_tree(
      context, logits[:, 0], extend, carry, run_leaves=True
    )
    hidden = jnp.concatenate(streams, axis=1) if shape.in_place else None
    return tree.draft, cache, hidden

  def propose(params, draft_state, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), draft_state
    whole = context.target_cache
    cache = whole.replace(layers=whole.layers[:exit_layer])
    sample = propose_chain if shape.loops else propose_tree
    draft, cache, hidden = sample(params, context, cache)
    return draft._replace(resume=Resume(hidden, cache.layers)), draft_state

  def update(params, draft_state, context, draft, accept_result, target_output):
    del params, context, draft, accept_result, target_output
    return draft_state

  cost = DrafterCost(exit_layer=exit_layer)
  spec = shape.spec._replace(name="early_exit")
  return Drafter(spec, init, propose, update, cost)
