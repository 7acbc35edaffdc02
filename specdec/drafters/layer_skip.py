"""Layer skip: the target drafts with some of its sublayers left out.

Draft & Verify (arXiv:2309.08168). Any attention or MLP may be skipped: it does
not run, and none of its weights is read. Invariant: the layers that are kept
draft with the KV that the whole target committed and write their own into its
scratch, where verification, which runs every layer, overwrites it. So there is
no second set of weights and no second cache.

Against an early exit the last layers, which make the stream fit the head, can
be kept; in return nothing of a draft is verification's to go on from.
`scripts/choose_layers.py` looks for the sublayers to skip.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specdec import draft_shape
from specdec.drafters.sample_model import sample_model
from specdec.types import (
  Array,
  Context,
  Draft,
  Drafter,
  Model,
  Resume,
  Skip,
)
from specdec.utils.constructors import cached


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


@cached
def layer_skip(
  target: Model,
  skip: Skip,
  k: int | None = None,
  threshold: Threshold | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with the target, less what `skip` names.

  Its draft tokens are drawn from the warped distribution that it hands over,
  under the sampling settings of the row. Without a threshold it has no state.

  With one, which is for chains, a row drafts until a token is less likely than
  its threshold, that token included, and at least one. Likely by the draft's
  own distribution before any warp, at every temperature: after it a greedy
  row's tokens all have probability 1. Whether a node is drafted thus depends on
  its ancestors alone and the token that ends the draft is verified, so the
  distribution of the text stays the target's (rule 7).

  Args:
    target: the very model that verifies; its `apply` must know `skip`.
    skip: any subset, nothing and everything included.
    k: draft tokens a round (with a threshold: at most), short for
      shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: a layer that the target does not have; both or neither of k and
      shape are given, or k < 0; a threshold with a tree, or its start or target
      outside [0, 1]; or drafting would run more nodes than the tree has: they
      share the target's scratch slots.
  """
  num_layers = target.num_layers
  for name, layers in skip._asdict().items():
    for layer in layers:
      if not 0 <= layer < num_layers:
        raise ValueError(
          f"skip.{name} names layer {layer}; this target has {num_layers} "
          f"layers, so it must be in 0..{num_layers - 1}"
        )
  shape = draft_shape.resolve(k, shape)
  draft_shape.check_scratch(shape)
  spec = shape.spec._replace(name="layer_skip")
  k = spec.max_depth
  if threshold is not None:
    for name in ("start", "target"):
      if not 0 <= getattr(threshold, name) <= 1:
        raise ValueError(
          f"threshold {name} = {getattr(threshold, name)}; it must be in 0..1"
        )
    if not shape.loops or shape.policy is not None:
      raise ValueError("a threshold ends chains; give k, or shape=chain(k)")
    if k == 0:
      threshold = None
    else:
      spec = spec._replace(widths=draft_shape.step_widths(k)[1:])

  def init(params, context: Context, prefill_output):
    if threshold is None:
      return None
    zero = jnp.zeros(context.length.shape)
    return _State(zero + threshold.start, zero, zero > 0)

  def propose(params, state: _State | None, context: Context):
    if k == 0:
      return draft_shape.pending_only(context), state

    policy = shape.policy
    if state is not None:
      policy = draft_shape.LengthPolicy(
        begin=lambda context, able=None: draft_shape.Plan(~state.over),
        classify=lambda probability: probability >= state.threshold,
        go_on=lambda plan, depth, likely: draft_shape.Plan(plan.going & likely),
      )
    apply = functools.partial(target.apply, params.target, skip=skip)
    draft, _, cache, _ = sample_model(
      context, shape, apply, context.target_cache, policy=policy
    )
    return draft._replace(resume=Resume(None, cache.layers)), state

  def update(params, state, context, draft: Draft, accept_result, output):
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

  return Drafter(spec, init, propose, update, idle=draft_shape.idle(shape))
