"""A smaller model drafts: it samples a chain, or a tree.

Leviathan et al. (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
Invariant: the drafter's cache trails the committed text by one token, or by
two where the last accepted draft token was drawn but never fed, so every round
starts with the last two tokens together. If the draft has another tokenizer
(`translated`), the text and its length are those of the draft's own tokens, and
a round starts with more of them: the target's last token may be several.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape
from specdec.drafters import token_map
from specdec.drafters.sample_model import sample_model
from specdec.types import (
  Array,
  Context,
  Drafter,
  KVCache,
  Model,
  Params,
  PyTree,
)
from specdec.utils.constructors import cached

_CATCH_UP = 8  # tokens of one pass after rounds without a draft
_WINDOW = 2  # last tokens that every round begins with
_MAPPED_WINDOW = 4  # of the draft's own: a draft token and one of three pieces


def _catch_up(
  draft_model: Model,
  weights: PyTree,
  cache: KVCache,
  tokens: Array,
  length: Array,
  window: int,
) -> tuple[Array, KVCache]:
  """Feeds what the cache lacks: logits [B, V] after the pending token.

  The cache's length is not moved past the token before it.

  Args:
    tokens, length: [B, L] and [B], the committed text.
    window: last tokens of it that are fed together, the pending one included.
  """
  size = tokens.shape[1]
  cache, _ = kv.prefill(
    draft_model,
    weights,
    tokens,
    cache,
    length - window,
    chunk=min(_CATCH_UP, size),
  )
  # A text that is shorter has only what it has, and after it is scratch.
  first = jnp.maximum(length - window, 0)
  last_tokens = jnp.take_along_axis(
    tokens, first[:, None] + jnp.arange(min(window, size))[None], axis=1
  )
  output, cache = draft_model.apply(
    weights, last_tokens, cache.replace(length=first)
  )
  last = (length - 1 - first)[:, None, None]
  logits = jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
  return logits, cache.replace(length=length - 1)


class _State(NamedTuple):
  """What the drafter carries from round to round."""

  cache: KVCache
  slot: Array | None  # [B, N] of a tree: the slot after the committed ones
  #                     that has node n's KV, -1 for none; None: a chain
  text: token_map.DraftText | None  # committed, in the draft's tokens; None:
  #                                   they are the target's


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
  return _drafter("model", draft_model, draft_shape.resolve(k, shape))


@cached
def translated(
  draft_model: Model,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
  room: int = 2,
) -> Drafter:
  """Drafts with a model of another tokenizer (TLI, arXiv:2502.05202).

  Weights: params.draft is a token_map.MappedWeights. Draft tokens are those
  that both vocabularies have; the draft's distribution over them, in the
  target's ids, is warped as any is and handed over, so that every rule holds.
  What is committed is spelled in the draft's own tokens on the device.

  Args:
    k, shape: as of `model`.
    room: tokens of the draft that a row has room for, in lengths of the
      target's buffer. A row whose text is longer is no longer drafted for,
      which committed text alone decides (rule 7).

  Raises:
    ValueError: both or neither of k and shape are given, k < 0, room < 1, or
      the draft is an encoder-decoder, whose source is in the target's ids.
  """
  if type(room) is not int or room < 1:
    raise ValueError(f"room = {room}; it must be an integer >= 1")
  if draft_model.encode is not None:
    raise ValueError(
      "the draft is an encoder-decoder, and its source is in the tokens of the "
      "target; with another tokenizer it must be a decoder"
    )
  shape = draft_shape.resolve(k, shape)
  return _drafter("translated", draft_model, shape, room)


def _drafter(
  name: str, draft_model: Model, shape: draft_shape.DraftShape, room: int = 0
) -> Drafter:
  """Returns the drafter; room 0: the draft has the target's tokens."""
  depth, num_nodes = shape.spec.max_depth, shape.spec.max_nodes
  window = _MAPPED_WINDOW if room else _WINDOW
  num_run = window + max(shape.num_run, num_nodes)
  kv.check_tokens(draft_model, num_run, "the draft")

  def parts(params: Params):
    """The draft's weights, and the map to its tokens if they are others."""
    draft = params.draft
    return (draft.model, draft.token_map) if room else (draft, None)

  def committed(text, context: Context) -> tuple[Array, Array]:
    """The text in the draft's tokens, and its length."""
    return (text.tokens, text.end) if room else (context.tokens, context.length)

  def init(params: Params, context: Context, prefill_output):
    weights, mapped = parts(params)
    batch, size = context.tokens.shape
    text = None
    if room:
      prefix = mapped.prefix.shape[0]
      text = token_map.empty(mapped, batch, prefix + room * size)
      text = token_map.read(text, mapped, context, min(kv.CHUNK, size))
    tokens, length = committed(text, context)
    size = tokens.shape[1]
    chunk = min(kv.CHUNK, size)
    slots = kv.num_slots(size + max(shape.num_run, num_nodes, chunk))
    if draft_model.encode is not None and context.source is None:
      raise ValueError(
        "the draft is an encoder-decoder and the target is not: it would "
        "have nothing to encode"
      )
    cache, _ = kv.prefill(
      draft_model,
      weights,
      tokens,
      kv.empty(draft_model, weights, batch, slots, context.source),
      length - 1,
      chunk=chunk,
    )
    slot = None
    if not shape.loops:
      slot = jnp.full((batch, num_nodes), -1, jnp.int32)
    return _State(cache, slot, text)

  def propose(params: Params, state: _State, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), state

    (weights, mapped), text = parts(params), state.text
    if room:
      text = token_map.read(text, mapped, context, depth + 1)
    tokens, length = committed(text, context)
    logits, cache = _catch_up(
      draft_model, weights, state.cache, tokens, length, window
    )
    ours, policy = draft_model, shape.policy
    if room:
      ours = token_map.model_of(draft_model, mapped)
      logits = token_map.spread(logits, mapped)
      policy = draft_shape.among(policy, text.drafts)
    if logits.shape[-1] != context.vocab_size:
      raise ValueError(
        f"the draft's distribution is over {logits.shape[-1]} tokens and the "
        f"target's over {context.vocab_size}; they must share one vocabulary"
      )
    if shape.loops:
      cache = cache.replace(length=length)
    apply = functools.partial(ours.apply, weights)
    draft, slot, cache, _ = sample_model(
      context, shape, apply, cache, logits=logits, policy=policy
    )
    if shape.loops:  # of the tokens that were fed, all but the drafted ones
      cache = cache.replace(length=length)
    if room:
      count = jnp.where(text.drafts, draft.count, 1)
      draft = draft._replace(count=count)
    return draft, _State(cache, slot, text)

  def update(params, state: _State, context, draft, accept_result, output):
    if depth == 0:
      return state
    accepted, cache = accept_result.num_accepted, state.cache
    path, text = accept_result.path, state.text
    if room:
      tokens = jnp.take_along_axis(draft.tokens, path[:, 1:], axis=1)
      accepted = token_map.num_kept(parts(params)[1], tokens, accepted)
    if shape.loops:
      # KV of the pending token and of every draft token but the last one were
      # written; where nothing was drafted, no KV was.
      drafted = jnp.maximum(draft.count - 2, 0)
      kept = cache.length + jnp.minimum(accepted, drafted)
      cache = cache.replace(length=kept)
    else:
      _, length = committed(text, context)
      slot = jnp.take_along_axis(state.slot, path, axis=1)
      last = jnp.take_along_axis(slot, accepted[:, None], axis=1)[:, 0]
      count = accepted + (last >= 0)  # the root as well
      cache = cache.replace(length=length - 1)
      # The deepest level was never run: its slots have nothing to keep.
      kept = jnp.maximum(slot[:, :-1], 0)
      cache = kv.commit(cache, kept, count, chain=False)
    if room:  # what a row without a text wrote is nothing
      kept = jnp.minimum(cache.length, text.tokens.shape[1])
      cache = cache.replace(length=jnp.where(text.length > 0, kept, 0))
    return state._replace(cache=cache)

  spec, idle = shape.spec._replace(name=name), draft_shape.idle(shape)
  return Drafter(spec, init, propose, update, idle=idle)
