"""The target's own first layers as drafter: exit early, resume where it left.

After layer E the residual stream goes through the target's final norm and head
(LayerSkip, arXiv:2404.16710; Draft & Verify, arXiv:2309.08168, skips layers
elsewhere). Invariant: the first E layers run once for every node, the last one
included; their KV lies in the target's cache and the streams that leave them
are handed over, so that verification runs layers E to L - 1 alone.

A tree of draft tokens is resumed likewise (tests/early_exit_test.py). A round
of k chained draft tokens costs (k + 1) E layers of one token each, k heads, and
L - E layers of k + 1 tokens. Against an independent draft there is no second
set of weights and no second cache. Layers that were never trained to predict by
themselves draft token badly: without such training this is usually slower than
plain decoding (docs/results.md).
"""

import jax
import jax.numpy as jnp

from specdec import draft_shape, draft_tree, sampling
from specdec.types import Context, Draft, Drafter, DraftSpec, Model, Resume


def early_exit(target: Model, exit_layer: int, k: int) -> Drafter:
  """Drafts k >= 0 tokens with layers 0 .. exit_layer - 1 of the target itself.

  Its draft tokens are drawn from the warped distribution that it hands over,
  under the sampling settings of the row. It has no weights and no state of its
  own.

  Args:
    target: the very model that verifies.
    exit_layer: E, in 1 .. L - 1: how many layers draft.
    k: drafted tokens a round.

  Raises:
    ValueError: E or k is out of range.
  """
  num_layers = len(jax.eval_shape(lambda: target.init_cache(1, 1)).layers)
  if not 1 <= exit_layer < num_layers:
    raise ValueError(
      f"exit_layer = {exit_layer}; this target has {num_layers} layers, so it "
      f"must be in 1..{num_layers - 1}"
    )
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  spec = DraftSpec(max_nodes=k + 1, max_depth=k, widths=(k + 1,))

  def init(params, context, prefill_output):
    del params, context, prefill_output

  def propose(params, draft_state, context: Context):
    pending = context.pending
    count = jnp.full_like(context.length, k + 1)
    if k == 0:
      return Draft(pending, draft_tree.chain(1), None, count), draft_state
    whole = context.target_cache
    cache = whole.replace(layers=whole.layers[:exit_layer])

    def run(token, cache, head):
      """One token through the first layers; its slot is no longer scratch."""
      output, cache = target.apply(
        params.target,
        token[:, None],
        cache,
        stop=exit_layer,
        head=head,
        features=(exit_layer,),
      )
      return output, cache.replace(length=cache.length + 1)

    def draft_token(carry, depth):
      token, cache = carry
      output, cache = run(token, cache, head=True)
      log_probs = sampling.warp(output.logits[:, 0], context.sampling)
      token = sampling.argmax(log_probs + context.noise(depth, depth))
      return (token, cache), (token, log_probs, output.features[0][:, 0])

    (last, cache), (drawn, all_log_probs, streams) = jax.lax.scan(
      draft_token, (pending[:, 0], cache), jnp.arange(1, k + 1)
    )
    output, cache = run(last, cache, head=False)
    root = jnp.zeros((1, *all_log_probs.shape[1:]))  # node 0 was not drawn
    draft = Draft(
      tokens=jnp.concatenate([pending, drawn.T], axis=1),
      parents=draft_tree.chain(k + 1),
      log_probs=jnp.concatenate([root, all_log_probs]).swapaxes(0, 1),
      count=count,
      resume=Resume(
        jnp.concatenate([streams.swapaxes(0, 1), output.features[0]], axis=1),
        cache.layers,
      ),
    )
    return draft, draft_state

  def update(params, draft_state, context, draft, accept_result, target_output):
    del params, context, draft, accept_result, target_output
    return draft_state

  return Drafter(spec, init, propose, update)


def early_exit_tree(
  target: Model, exit_layer: int, expansion: draft_shape.DraftShape
) -> Drafter:
  """Drafts a tree with the target's first layers, a level in one call.

  A static tree is resumed after layer E. A dynamic one is run again from the
  first layer on: its nodes stand in another order than they were tried in, and
  its leaves were never run.

  Args:
    exit_layer: E, in 1 .. L - 1.
    draft shape: the shape, expand.static or expand.dynamic.

  Raises:
    ValueError: E is out of range, or drafting would run more nodes than the
      tree has: they share the target's scratch.
  """
  baseline = early_exit(target, exit_layer, 0)  # is there such a layer?
  num_nodes = expansion.spec.max_nodes
  draft_shape.check_scratch(expansion)

  def propose(params, draft_state, context: Context):
    whole = context.target_cache
    cache = whole.replace(layers=whole.layers[:exit_layer])
    streams = []

    def run(tokens, parents, first, wanted):
      nonlocal cache
      output, cache = target.apply(
        params.target,
        tokens,
        cache,
        parents=parents,
        first=first,
        stop=exit_layer,
        head=wanted,
        features=(exit_layer,),
      )
      streams.append(output.features[0])
      return output.logits

    pending = context.pending
    logits = run(pending, draft_tree.chain(1), 0, True)[:, 0]
    grown = expansion.sample_tree(context, logits, run, True)
    layers = cache.layers
    hidden = None
    if expansion.in_place:
      hidden = jnp.concatenate(streams, axis=1)
    count = jnp.full_like(context.length, num_nodes)
    draft = Draft(
      grown.tokens,
      grown.parents,
      grown.log_probs,
      count,
      Resume(hidden, layers),
    )
    return draft, draft_state

  return baseline._replace(spec=expansion.spec, propose=propose)
