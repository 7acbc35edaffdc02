"""A smaller model drafts: it samples a chain, or a tree.

Leviathan et al. (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
Invariant: the drafter's cache trails the committed text by one token, or by
two where the last accepted draft token was drawn but never fed, so every round
starts with the last two tokens together.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape
from specdec.drafters.sample_model import sample_model
from specdec.types import (
  Array,
  Context,
  Drafter,
  KVCache,
  Model,
  Params,
)
from specdec.utils.constructors import cached

_CATCH_UP = 8  # tokens of one pass after rounds without a draft


def _catch_up(
  draft_model: Model, params: Params, cache: KVCache, context: Context
) -> tuple[Array, KVCache]:
  """Feeds what the cache lacks: logits [B, V] after the pending token.

  The cache's length is not moved past the token before it.
  """
  tokens, length = context.tokens, context.length
  cache, _ = kv.prefill(
    draft_model,
    params.draft,
    tokens,
    cache,
    length - 2,
    chunk=min(_CATCH_UP, tokens.shape[1]),
  )
  # The last two tokens, the pending one included; a text of one token has only
  # that, and what stands behind it is scratch.
  first = jnp.maximum(length - 2, 0)
  pair = jnp.take_along_axis(
    tokens, first[:, None] + jnp.arange(min(2, tokens.shape[1]))[None], axis=1
  )
  output, cache = draft_model.apply(
    params.draft, pair, cache.replace(length=first)
  )
  last = (length - 1 - first)[:, None, None]
  logits = jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
  if logits.shape[-1] != context.vocab_size:
    raise ValueError(
      f"the draft's distribution is over {logits.shape[-1]} tokens and the "
      f"target's over {context.vocab_size}; they must share one vocabulary"
    )
  return logits, cache.replace(length=length - 1)


class _State(NamedTuple):
  """What the drafter carries from round to round."""

  cache: KVCache
  slot: Array | None  # [B, N] of a tree: the slot behind the committed ones
  #                     that has node n's KV, -1 for none; None: a chain


@cached
def model(
  draft_model: Model,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with `draft_model`, weights params.draft.

  Its draft tokens are drawn from the warped distribution that it hands over
  (rules 5 and 6), under the sampling settings of the row. A chain is drawn in a
  loop of one token a call, a tree with one call a level and a tree mask.

  Args:
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: both or neither of k and shape are given, or k < 0.
  """
  shape = draft_shape.resolve(k, shape)
  depth, num_nodes = shape.spec.max_depth, shape.spec.max_nodes

  def init(params: Params, context: Context, prefill_output):
    del prefill_output
    batch, size = context.tokens.shape
    chunk = min(kv.CHUNK, size)
    slots = kv.num_slots(size + max(shape.num_run, num_nodes, chunk))
    if draft_model.encode is not None and context.source is None:
      raise ValueError(
        "the draft is an encoder-decoder and the target is not: it would "
        "have nothing to encode"
      )
    cache, _ = kv.prefill(
      draft_model,
      params.draft,
      context.tokens,
      kv.empty(draft_model, params.draft, batch, slots, context.source),
      context.length - 1,
      chunk=chunk,
    )
    slot = None
    if not shape.loops:
      slot = jnp.full((batch, num_nodes), -1, jnp.int32)
    return _State(cache, slot)

  def propose(params: Params, state: _State, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), state

    def drafted(state: _State):
      logits, cache = _catch_up(draft_model, params, state.cache, context)
      if shape.loops:
        cache = cache.replace(length=context.length)
      apply = functools.partial(draft_model.apply, params.draft)
      draft, slot, cache, _ = sample_model(
        context, shape, apply, cache, logits=logits
      )
      if shape.loops:  # of the tokens that were fed, all but the drafted ones
        cache = cache.replace(length=context.length)
      return draft, _State(cache, slot)

    return draft_shape.unless_idle(shape, context, drafted, state)

  def update(params, state: _State, context, draft, accept_result, output):
    del params, output
    if depth == 0:
      return state
    accepted, cache = accept_result.num_accepted, state.cache
    if shape.loops:
      # KV of the pending token and of every draft token but the last one were
      # written; where nothing was drafted, no KV was.
      drafted = jnp.maximum(draft.count - 2, 0)
      length = cache.length + jnp.minimum(accepted, drafted)
      return state._replace(cache=cache.replace(length=length))
    slot = jnp.take_along_axis(state.slot, accept_result.path, axis=1)
    last = jnp.take_along_axis(slot, accepted[:, None], axis=1)[:, 0]
    count = accepted + (last >= 0)  # the root as well
    cache = cache.replace(length=context.length - 1)
    cache = kv.commit(cache, jnp.maximum(slot, 0), count, chain=False)
    return state._replace(cache=cache)

  return Drafter(shape.spec._replace(name="model"), init, propose, update)
