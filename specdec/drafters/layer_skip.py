"""The target itself, some of its sublayers left out, as drafter.

Draft & Verify (arXiv:2309.08168). Any attention or MLP may be skipped: it does
not run, and none of its weights is read. Invariant: the layers that are kept
draft with the KV that the whole target committed and write their own into its
scratch, where verification, which runs every layer, overwrites it. So there is
no second set of weights and no second cache.

Against an early exit the last layers, which make the stream fit the head, can
be kept; in return nothing of a draft is verification's to go on from.
`scripts/choose_layers.py` looks for the sublayers to skip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import draft_shape, draft_tree, sampling
from specdec.types import (
  AcceptResult,
  Array,
  Context,
  Draft,
  Drafter,
  DraftSpec,
  Model,
  Resume,
  Skip,
)


class Threshold(NamedTuple):
  """When drafting stops: at a token less likely than a row's threshold.

  After a round that drafted d tokens and kept m of them (section 3.3 of the
  paper, constants of its code)

    matchness = memory * matchness + (1 - memory) * m / d
    wanted_th = th + step  if matchness < target  else  th - step,
                or th where the draft was as long as it can be
    th        = inertia * th + (1 - inertia) * wanted_th

  clipped to [0, 1], or a bad text of a thousand tokens would take another
  thousand to forget. A step of 0 is a fixed threshold.
  """

  start: float = 0.8  # the paper's greedy one; 0.5 for samples
  target: float = 0.9
  step: float = 0.01
  memory: float = 0.5
  inertia: float = 0.9


class _State(NamedTuple):
  """Of the adaptive threshold; done rows stay as they were."""

  threshold: Array  # [B]
  matchness: Array  # [B]
  over: Array  # [B] bool: the row committed nothing, it is done


def _check(target: Model, skip: Skip, k: int) -> None:
  num_layers = len(jax.eval_shape(lambda: target.init_cache(1, 1)).layers)
  for name, layers in skip._asdict().items():
    for layer in layers:
      if not 0 <= layer < num_layers:
        raise ValueError(
          f"skip.{name} names layer {layer}; this target has {num_layers} "
          f"layers, so it must be in 0..{num_layers - 1}"
        )
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")


def _widths(k: int) -> tuple[int, ...]:
  """Node counts for 1, 2, 4 .. 128 and k drafted tokens."""
  return tuple(
    sorted({1 + n for n in (*(2**i for i in range(8)), k) if n <= k})
  )


def layer_skip(
  target: Model, skip: Skip, k: int, threshold: Threshold | None = None
) -> Drafter:
  """Drafts a chain of k >= 0 tokens with the target, less what `skip` names.

  Its draft tokens are drawn from the warped distribution that it hands over,
  under the sampling settings of the row. Without a threshold it has no state.

  With one a row drafts until a token is less likely than its threshold, that
  token included, and at least one. Likely by the draft's own distribution
  before any warp, at every temperature: after it a greedy row's tokens all have
  probability 1. Whether a node is drafted thus depends on its ancestors alone
  and the token that ends the draft is verified, so the distribution of the text
  stays the target's (rule 7).

  Args:
    target: the very model that verifies; its `apply` must know `skip`.
    skip: any subset, nothing and everything included.
    k: drafted tokens a round, with a threshold at most.

  Raises:
    ValueError: a layer that the target does not have, k < 0, or a start or
      target outside [0, 1].
  """
  _check(target, skip, k)
  for name in ("start", "target") if threshold else ():
    if not 0 <= getattr(threshold, name) <= 1:
      raise ValueError(
        f"threshold {name} = {getattr(threshold, name)}; it must be in 0..1"
      )
  if k == 0:
    threshold = None
  widths = _widths(k) if threshold else (k + 1,)
  spec = DraftSpec(max_nodes=k + 1, max_depth=k, widths=widths)

  def init(params, context: Context, prefill_output):
    del params, prefill_output
    if threshold is None:
      return None
    zero = jnp.zeros(context.length.shape)
    return _State(zero + threshold.start, zero, zero > 0)

  def propose(params, state: _State | None, context: Context):
    pending, cache = context.pending, context.target_cache
    count = jnp.ones_like(context.length)
    if k == 0:
      return Draft(pending, draft_tree.chain(1), None, count), state
    batch, vocab_size = len(count), target.vocab_size
    tokens = jnp.zeros((k + 1, batch), pending.dtype).at[0].set(pending[:, 0])
    all_log_probs = jnp.zeros(
      (k + 1, batch, vocab_size)
    )  # node 0 was not drawn
    going = jnp.ones((batch,), bool) if state is None else ~state.over

    def unfinished(carry):
      depth, going, *_ = carry
      # Without a threshold the number of turns is known to the compiler.
      return depth <= k if state is None else (depth <= k) & jnp.any(going)

    def extend(carry):
      depth, going, count, tokens, all_log_probs, cache = carry
      output, cache = target.apply(
        params.target, tokens[depth - 1][:, None], cache, skip=skip
      )
      logits = output.logits[:, 0]
      log_probs = sampling.warp(logits, context.sampling)
      token = sampling.argmax(log_probs + context.noise(depth, depth))
      count += going  # the token that stops a row is in its draft
      if state is not None:
        own = jnp.take_along_axis(
          jax.nn.log_softmax(logits), token[:, None], axis=1
        )
        going &= jnp.exp(own[:, 0]) >= state.threshold
      return (
        depth + 1,
        going,
        count,
        tokens.at[depth].set(token),
        all_log_probs.at[depth].set(log_probs),
        cache.replace(length=cache.length + 1),  # no longer scratch
      )

    _, _, count, tokens, all_log_probs, cache = jax.lax.while_loop(
      unfinished, extend, (1, going, count, tokens, all_log_probs, cache)
    )
    draft = Draft(
      tokens.T,
      draft_tree.chain(k + 1),
      all_log_probs.swapaxes(0, 1),
      count,
      Resume(None, cache.layers),
    )
    return draft, state

  def update(
    params,
    state,
    context,
    draft: Draft,
    accept_result: AcceptResult,
    target_output,
  ):
    del params, context, target_output
    if threshold is None:
      return None
    t, drafted = threshold, draft.count - 1
    over = accept_result.num_committed == 0
    share = accept_result.num_accepted / jnp.maximum(drafted, 1)
    matchness = t.memory * state.matchness + (1 - t.memory) * share
    step = jnp.where(drafted == k, 0.0, -t.step)
    step = jnp.where(matchness < t.target, t.step, step)
    moved = state.threshold + (1 - t.inertia) * step
    return _State(
      jnp.where(over, state.threshold, jnp.clip(moved, 0.0, 1.0)),
      jnp.where(over, state.matchness, matchness),
      over,
    )

  return Drafter(spec, init, propose, update)


def layer_skip_tree(
  target: Model, skip: Skip, expansion: draft_shape.DraftShape
) -> Drafter:
  """Drafts a tree with the target, less what `skip` names, a level in one call.

  Args:
    skip: as of `layer_skip`.
    draft shape: the shape, expand.static or expand.dynamic.

  Raises:
    ValueError: a layer that the target does not have, or drafting would run
      more nodes than the tree has: they share the target's scratch.
  """
  baseline = layer_skip(target, skip, 0)  # are there such layers?
  num_nodes = expansion.spec.max_nodes
  draft_shape.check_scratch(expansion)

  def propose(params, draft_state, context: Context):
    cache = context.target_cache

    def run(tokens, parents, first, wanted):
      nonlocal cache
      output, cache = target.apply(
        params.target,
        tokens,
        cache,
        parents=parents,
        first=first,
        head=wanted,
        skip=skip,
      )
      return output.logits

    logits = run(context.pending, draft_tree.chain(1), 0, True)[:, 0]
    grown = expansion.sample_tree(context, logits, run, False)
    draft = Draft(
      grown.tokens,
      grown.parents,
      grown.log_probs,
      jnp.full_like(context.length, num_nodes),
      Resume(None, cache.layers),
    )
    return draft, draft_state

  return baseline._replace(spec=expansion.spec, propose=propose)
