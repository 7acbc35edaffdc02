"""An independent, smaller model as drafter: it samples a chain, or a tree.

Leviathan et al. (arXiv:2211.17192); SpecInfer (arXiv:2305.09781) for trees.
Invariant: the drafter's cache trails the committed text by one token, or by
two where the last accepted guess was drawn but never fed, so every round starts
with the last two tokens together.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import expand, prefill, sampling, tree
from specdec.types import (
  Array,
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


def _prefill(draft_model: Model, max_nodes: int):
  """A drafter's init: its cache, filled but for the pending token."""

  def init(params: Params, context: Context, prefill_output):
    del prefill_output
    batch, size = context.tokens.shape
    chunk = min(prefill.CHUNK, size)
    slots = kv.num_slots(size + max(max_nodes, chunk))
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

  return init


def _catch_up(
  draft_model: Model, params: Params, cache: KVCache, context: Context
) -> tuple[Array, KVCache]:
  """Feeds what the cache lacks: logits [B, V] after the pending token.

  The cache's length is not moved past the token before it.
  """
  tokens, length = context.tokens, context.length
  cache, _ = prefill.advance(
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
      f"the draft's law is over {logits.shape[-1]} tokens and the target's "
      f"over {wanted}; they must share one vocabulary"
    )
  return logits, cache.replace(length=length - 1)


def model(draft_model: Model, k: int) -> Drafter:
  """Drafts a chain of k >= 0 tokens with `draft_model`, weights params.draft.

  Its guesses are drawn from the warped law that it hands over (DESIGN rules 5
  and 6), under the sampling settings of the row.
  """
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  spec = DraftSpec(max_nodes=k + 1, max_depth=k, widths=(k + 1,))

  init = _prefill(draft_model, k + 1)

  def propose(params: Params, cache: KVCache, context: Context):
    tokens, length = context.tokens, context.length
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    count = jnp.full_like(length, k + 1)
    if k == 0:
      return Draft(pending, tree.chain(1), None, count), cache
    logits, cache = _catch_up(draft_model, params, cache, context)

    def draw(logits, depth):
      law = sampling.warp(logits, context.sampling)
      return sampling.argmax(law + context.noise(depth, depth)), law

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


def model_tree(
  draft_model: Model, parents: np.ndarray, siblings: str = "without_replacement"
) -> Drafter:
  """Drafts a static tree: one call of `draft_model` a level, with a tree mask.

  Args:
    parents: [N] of the tree, as tree.from_paths or tree.parallel make them.
    siblings: how the children of a node are drawn, one of expand.KINDS.

  Raises:
    ValueError: the tree is not in level order, or the kind is unknown.
  """
  parents = np.asarray(parents, np.int32)
  levels = tree.levels(parents)
  kind = expand.check_kind(parents, siblings)
  num_nodes, depth = len(parents), len(levels) - 1
  spec = DraftSpec(num_nodes, depth, (num_nodes,), chain=False, siblings=kind)
  written = np.zeros(num_nodes, bool)  # whose K/V drafting writes
  for level in levels:
    written[expand.run_part(parents, level)] = True
  written[0] = True

  def propose(params: Params, cache: KVCache, context: Context):
    logits, cache = _catch_up(draft_model, params, cache, context)

    def run(tokens, nodes, wanted):
      nonlocal cache
      output, cache = draft_model.apply(
        params.draft,
        tokens,
        cache,
        parents=parents[: nodes.stop],
        first=nodes.start,
        head=wanted,
      )
      return output.logits

    grown = expand.grow(parents, siblings, context, logits, run)
    count = jnp.full_like(context.length, num_nodes)
    return Draft(grown.tokens, parents, grown.log_probs, count), kv.pin(cache)

  def update(
    params, cache: KVCache, context, draft, verdict: Verdict, target_output
  ):
    del params, draft, target_output
    row = jnp.arange(verdict.num_accepted.shape[0])
    last = verdict.path[row, verdict.num_accepted]
    kept = verdict.num_accepted + jnp.asarray(written)[last]  # the root as well
    cache = cache.replace(length=context.length - 1)
    return kv.commit(cache, verdict.path, kept, chain=False)

  return Drafter(spec, _prefill(draft_model, num_nodes), propose, update)
