"""An independent, smaller model as drafter: it samples a chain, or a tree.

Leviathan et al. (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
Invariant: the drafter's cache trails the committed text by one token, or by
two where the last accepted draft token was drawn but never fed, so every round
starts with the last two tokens together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape, draft_tree, sampling
from specdec.types import (
  AcceptResult,
  Array,
  Context,
  Draft,
  Drafter,
  DraftSpec,
  KVCache,
  Model,
  Params,
)

_CATCH_UP = 8  # tokens of one pass after rounds without a draft


def _prefill(draft_model: Model, max_nodes: int):
  """A drafter's init: its cache, filled but for the pending token."""

  def init(params: Params, context: Context, prefill_output):
    del prefill_output
    batch, size = context.tokens.shape
    chunk = min(kv.CHUNK, size)
    slots = kv.num_slots(size + max(max_nodes, chunk))
    cache = draft_model.init_cache(batch, slots)
    cache, _ = kv.prefill(
      draft_model,
      params.draft,
      context.tokens,
      cache,
      context.length - 1,
      chunk=chunk,
    )
    return cache

  return init


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
  wanted = jax.eval_shape(lambda: context.noise(1, 1)).shape[-1]
  if logits.shape[-1] != wanted:
    raise ValueError(
      f"the draft's distribution is over {logits.shape[-1]} tokens and the "
      "target's "
      f"over {wanted}; they must share one vocabulary"
    )
  return logits, cache.replace(length=length - 1)


def model(draft_model: Model, k: int) -> Drafter:
  """Drafts a chain of k >= 0 tokens with `draft_model`, weights params.draft.

  Its draft tokens are drawn from the warped distribution that it hands over
  (rules 5 and 6), under the sampling settings of the row.
  """
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  spec = DraftSpec(max_nodes=k + 1, max_depth=k, widths=(k + 1,))
  init = _prefill(draft_model, k + 1)

  def propose(params: Params, cache: KVCache, context: Context):
    length, pending = context.length, context.pending
    count = jnp.full_like(length, k + 1)
    if k == 0:
      return Draft(pending, draft_tree.chain(1), None, count), cache
    logits, cache = _catch_up(draft_model, params, cache, context)

    def draw(logits, depth):
      log_probs = sampling.warp(logits, context.sampling)
      return sampling.argmax(log_probs + context.noise(depth, depth)), log_probs

    token, log_probs = draw(logits, 1)
    cache = cache.replace(length=length)
    drawn = jnp.zeros((k, *token.shape), token.dtype).at[0].set(token)
    all_log_probs = jnp.zeros((k, *log_probs.shape)).at[0].set(log_probs)

    def extend(i, carry):
      drawn, all_log_probs, cache = carry
      output, cache = draft_model.apply(
        params.draft, drawn[i - 1][:, None], cache
      )
      token, log_probs = draw(output.logits[:, 0], i + 1)
      cache = cache.replace(length=cache.length + 1)
      return drawn.at[i].set(token), all_log_probs.at[i].set(log_probs), cache

    drawn, all_log_probs, cache = jax.lax.fori_loop(
      1, k, extend, (drawn, all_log_probs, cache)
    )
    root = jnp.zeros((1, *log_probs.shape))  # node 0 was not drawn
    draft = Draft(
      tokens=jnp.concatenate([pending, drawn.T], axis=1),
      parents=draft_tree.chain(k + 1),
      log_probs=jnp.concatenate([root, all_log_probs]).swapaxes(0, 1),
      count=count,
    )
    return draft, cache

  def update(
    params,
    cache: KVCache,
    context,
    draft,
    accept_result: AcceptResult,
    target_output,
  ):
    del params, draft, target_output
    if k == 0:
      return cache
    # KV of the pending token and of every draft token but the last were
    # written.
    kept = jnp.minimum(accept_result.num_accepted, k - 1)
    return cache.replace(length=context.length + kept)

  return Drafter(spec, init, propose, update)


class _TreeState(NamedTuple):
  """What a drafter of trees carries from a draft to its accept_result."""

  cache: KVCache
  slot: Array  # [B, N] where node n's KV stands behind the committed ones; -1


def model_tree(
  draft_model: Model, expansion: draft_shape.DraftShape
) -> Drafter:
  """Drafts a tree: one call of `draft_model` a level, with a tree mask.

  Args:
    draft shape: the shape, expand.static or expand.dynamic.
  """
  num_nodes = expansion.spec.max_nodes
  fill = _prefill(draft_model, max(expansion.num_run, num_nodes))

  def init(params: Params, context: Context, prefill_output):
    nowhere = jnp.full((context.length.shape[0], num_nodes), -1, jnp.int32)
    return _TreeState(fill(params, context, prefill_output), nowhere)

  def propose(params: Params, state: _TreeState, context: Context):
    logits, cache = _catch_up(draft_model, params, state.cache, context)

    def run(tokens, parents, first, wanted):
      nonlocal cache
      output, cache = draft_model.apply(
        params.draft, tokens, cache, parents=parents, first=first, head=wanted
      )
      return output.logits

    grown = expansion.sample_tree(context, logits, run, False)
    count = jnp.full_like(context.length, num_nodes)
    slot = jnp.broadcast_to(jnp.asarray(grown.slot), grown.tokens.shape)
    draft = Draft(grown.tokens, grown.parents, grown.log_probs, count)
    return draft, _TreeState(cache, slot)

  def update(
    params,
    state: _TreeState,
    context,
    draft,
    accept_result: AcceptResult,
    target_output,
  ):
    del params, draft, target_output
    slot = jnp.take_along_axis(
      state.slot, accept_result.path, axis=1
    )  # [B, D+1]
    last = jnp.take_along_axis(
      slot, accept_result.num_accepted[:, None], axis=1
    )
    kept = accept_result.num_accepted + (last[:, 0] >= 0)  # the root as well
    cache = state.cache.replace(length=context.length - 1)
    cache = kv.commit(cache, jnp.maximum(slot, 0), kept, chain=False)
    return state._replace(cache=cache)

  return Drafter(expansion.spec, init, propose, update)
