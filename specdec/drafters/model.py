"""An independent, smaller model as drafter: it samples a chain of k tokens.

Leviathan et al. (arXiv:2211.17192). Invariant: the drafter's cache trails the
committed text by one token, or by two after full acceptance (its last guess was
drawn but never fed), so every round starts with the last two tokens together.
"""

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import prefill, sampling, tree
from specdec.types import (
  Context,
  Draft,
  Drafter,
  DraftSpec,
  KVCache,
  Model,
  Params,
  Verdict,
)

_CATCH_UP = 8  # tokens of one pass after rounds without a draft


def model(draft_model: Model, k: int) -> Drafter:
  """Drafts k >= 0 tokens with `draft_model`, whose weights are params.draft.

  Its guesses are drawn from the warped law that it hands over (DESIGN rules 5
  and 6), under the sampling settings of the row.
  """
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  spec = DraftSpec(max_nodes=k + 1, max_depth=k, widths=(k + 1,))

  def init(params: Params, context: Context, prefill_output):
    del prefill_output
    batch, size = context.tokens.shape
    chunk = min(prefill.CHUNK, size)
    slots = kv.num_slots(size + max(k + 1, chunk))
    cache = draft_model.init_cache(batch, slots)
    cache, _ = prefill.advance(
      draft_model,
      params.draft,
      context.tokens,
      cache,
      context.length - 1,
      chunk=chunk,
    )
    return cache

  def propose(params: Params, cache: KVCache, context: Context):
    tokens, length = context.tokens, context.length
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    count = jnp.full_like(length, k + 1)
    if k == 0:
      return Draft(pending, tree.chain(1), None, count), cache
    cache, _ = prefill.advance(
      draft_model,
      params.draft,
      tokens,
      cache,
      length - 2,
      chunk=min(_CATCH_UP, tokens.shape[1]),
    )

    def draw(logits, depth):
      law = sampling.warp(logits, context.sampling)
      noise = context.noise(depth, depth)
      if law.shape != noise.shape:
        raise ValueError(
          f"the draft's law is over {law.shape[-1]} tokens and the target's "
          f"over {noise.shape[-1]}; they must share one vocabulary"
        )
      return sampling.argmax(law + noise), law

    # The last two tokens, the pending one included; a text of one token has
    # only that, and what stands behind it is scratch.
    first = jnp.maximum(length - 2, 0)
    pair = jnp.take_along_axis(
      tokens, first[:, None] + jnp.arange(min(2, tokens.shape[1]))[None], axis=1
    )
    output, cache = draft_model.apply(
      params.draft, pair, cache.replace(length=first)
    )
    last = (length - 1 - first)[:, None, None]
    logits = jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
    token, law = draw(logits, 1)
    cache = kv.pin(cache.replace(length=length))
    drawn = jnp.zeros((k, *token.shape), token.dtype).at[0].set(token)
    laws = jnp.zeros((k, *law.shape)).at[0].set(law)

    def extend(i, carry):
      drawn, laws, cache = carry
      output, cache = draft_model.apply(
        params.draft, drawn[i - 1][:, None], cache
      )
      token, law = draw(output.logits[:, 0], i + 1)
      cache = kv.pin(cache.replace(length=cache.length + 1))
      return drawn.at[i].set(token), laws.at[i].set(law), cache

    drawn, laws, cache = jax.lax.fori_loop(1, k, extend, (drawn, laws, cache))
    root = jnp.zeros((1, *law.shape))  # node 0 was not drawn
    draft = Draft(
      tokens=jnp.concatenate([pending, drawn.T], axis=1),
      parents=tree.chain(k + 1),
      log_probs=jnp.concatenate([root, laws]).swapaxes(0, 1),
      count=count,
    )
    return draft, cache

  def update(
    params, cache: KVCache, context, draft, verdict: Verdict, target_output
  ):
    del params, draft, target_output
    if k == 0:
      return cache
    # K/V of the pending token and of every guess but the last were written.
    kept = jnp.minimum(verdict.num_accepted, k - 1)
    return cache.replace(length=context.length + kept)

  return Drafter(spec, init, propose, update)
