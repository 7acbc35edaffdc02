"""A smaller model drafts all levels in one pass, from mask tokens.

PARD (An et al., arXiv:2504.18583). It was taught to predict, from k - 1 mask
tokens after the text, the next k tokens at once. Invariant: the cache holds
KV of committed text alone. A pass takes what the text has gained since the one
before, and masks after it; the masks' KV lie past the cache's length, and are
written over by the next pass.
"""

import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape
from specdec.drafters import mask_slots
from specdec.types import Context, Drafter, KVCache, Model, Params
from specdec.utils.constructors import cached

_CATCH_UP = 8  # tokens of one pass after rounds without a draft


@cached
def pard(
  draft_model: Model,
  mask_token: int,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with `draft_model`, weights params.draft, in one pass a round.

  Its state is the KVCache. Tokens of a draft are drawn independently of each
  other, each from its level's warped distribution, which is handed over.

  Args:
    mask_token: the token that the model was taught with.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: both or neither of k and shape are given, k < 0, or the model
      has no such token.
  """
  if not 0 <= mask_token < draft_model.vocab_size:
    raise ValueError(
      f"mask_token = {mask_token}; the draft has {draft_model.vocab_size} "
      "tokens"
    )
  shape = draft_shape.resolve(k, shape)
  depth = shape.spec.max_depth
  # A round commits depth + 1 tokens at most; after them are depth - 1 masks.
  size = 2 * depth
  kv.check_tokens(draft_model, size, "the draft")

  def init(params: Params, context: Context, prefill_output):
    batch, length = context.tokens.shape
    if draft_model.encode is not None and context.source is None:
      raise ValueError(
        "the draft is an encoder-decoder and the target is not: it would "
        "have nothing to encode"
      )
    chunk = min(kv.CHUNK, length)
    slots = kv.num_slots(length + max(size, chunk, _CATCH_UP))
    cache = kv.empty(draft_model, params.draft, batch, slots, context.source)
    cache, _ = kv.prefill(
      draft_model,
      params.draft,
      context.tokens,
      cache,
      context.length - 1,
      chunk=chunk,
    )
    return cache

  def propose(params: Params, cache: KVCache, context: Context):
    if depth == 0:
      return draft_shape.pending_only(context), cache
    tokens, length = context.tokens, context.length
    cache, _ = kv.prefill(
      draft_model,
      params.draft,
      tokens,
      cache,
      length - (depth + 1),
      chunk=min(_CATCH_UP, tokens.shape[1]),
    )
    first = jnp.minimum(cache.length, length - 1)  # the pending one at least
    place = first[:, None] + jnp.arange(size)[None]
    fed = jnp.take_along_axis(
      tokens, jnp.minimum(place, tokens.shape[1] - 1), axis=1
    )
    fed = jnp.where(place < length[:, None], fed, mask_token)
    output, cache = draft_model.apply(
      params.draft, fed, cache.replace(length=first)
    )
    if output.logits.shape[-1] != context.vocab_size:
      raise ValueError(
        f"the draft's distribution is over {output.logits.shape[-1]} tokens "
        f"and the target's over {context.vocab_size}; they must share one "
        "vocabulary"
      )
    # The pending token's row, and those of the masks after it.
    row = (length - 1 - first)[:, None] + jnp.arange(depth)[None]
    logits = jnp.take_along_axis(output.logits, row[:, :, None], axis=1)
    draft = mask_slots.draw(context, shape, logits)
    return draft, cache.replace(length=length)

  def update(params, cache, *rest):
    return cache

  spec, idle = shape.spec._replace(name="pard"), draft_shape.idle(shape)
  return Drafter(spec, init, propose, update, idle=idle)
