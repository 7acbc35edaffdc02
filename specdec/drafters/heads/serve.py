"""Serving a trained head: a DraftHead behind the three functions of a Drafter.

Invariant: after `init` and every `update` the head's own KV cache holds every
committed token but the pending one, each computed from the target's output
before it, and `seed` encodes the target's last output. In the published layout
the first token, before which there is none, is left out; so the length is -1
while that token is pending. So rounds of any length, undrafted ones too, leave
nothing to catch up with. Draft tokens fill scratch slots past `length`; the
accepted ones are run again on the target's own hidden states.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape, draft_tree, sharding
from specdec.drafters import mask_slots
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.draft_head import DraftHead, View
from specdec.models import attention
from specdec.types import (
  Array,
  Context,
  Drafter,
  KVCache,
  Model,
  ModelOutput,
  Params,
  Resume,
)
from specdec.utils.constructors import cached


class State(NamedTuple):
  """What a head carries from round to round."""

  seed: Array  # [B, W'] `encode` of the token before the pending one; 0: none
  cache: KVCache  # length [B]: committed tokens but the pending one, and but
  #                 the first of the published layout


class _Carry(NamedTuple):
  """What drafting threads from level to level of a draft."""

  level: int  # of the next call
  layers: tuple  # the head's own KV
  hidden: Array | None  # [B, nodes run so far, W]
  target: KVCache | None  # an exit's: the target's first layers
  exit_hidden: tuple[Array, ...]  # an exit's: [B, T, M] of every call


@cached
def drafter(
  draft_head: DraftHead,
  target: Model,
  shape: draft_shape.DraftShape,
  place: sharding.Placement | None = None,
  max_external_drafts: int = 0,
) -> Drafter:
  """Drafts a chain or a tree, a level in one call, or all of it in one pass of
  a parallel head.

  Weights: params.draft as `draft_head.weights_of` returns it.

  Args:
    target: the very model that verifies.
    shape: what a draft looks like.
    place: the target's, on a mesh: distributions are split as its own are.
    max_external_drafts: of DraftSpec; for `drafters.fallback`.

  Raises:
    ValueError: the shape is deeper than the head's levels; an exit's tree runs
      more nodes than it keeps (they share the target's scratch slots); or an
      exit is to have max_external_drafts: verification goes on from its own
      draft tokens.
  """
  head_config, spec = draft_head.head_config, shape.spec
  exits, resets = head_config.exits, head_config.resets_each_round
  head_config.check_levels(spec.max_depth)
  if exits:
    draft_shape.check_scratch(shape)
  if exits and max_external_drafts:
    raise ValueError(
      "an early exit cannot be the fallback for another drafter: verification "
      "goes on from what it computed for its own draft tokens"
    )
  place = place or sharding.anywhere

  def init(params: Params, context: Context, output: ModelOutput | None):
    encoded = draft_head.encode(params.draft["net"], output)  # [B, P, W']
    last = context.length - 2
    seed = _row(encoded, jnp.maximum(last, 0))
    seed = jnp.where(last[:, None] >= 0, seed, 0)
    layers, length = (), context.length - 1 - draft_head.start
    if draft_head.has_kv_cache:
      size = context.tokens.shape[1]
      scratch = max(shape.num_run, max(spec.max_depth, max_external_drafts) + 1)
      cache = draft_head.init_cache(len(last), kv.num_slots(size + scratch))
      layers = _prefill(draft_head, params, context, output, encoded, cache)
    return State(seed, KVCache(layers, length))

  def run_exit(params, carry, tokens, parents, first):
    """Runs nodes through the target's first layers: [B, T, M], and a carry."""
    if not exits:
      return None, carry
    output, cache = target.apply(
      params.target,
      tokens,
      carry.target,
      parents=parents,
      first=first,
      stop=head_config.exit_layer,
      head=False,
      features=(head_config.exit_layer,),
    )
    stream = output.features[0]
    hidden = (*carry.exit_hidden, stream)
    return stream, carry._replace(target=cache, exit_hidden=hidden)

  def propose(params: Params, state: State, context: Context):
    if not head_config.parallel:
      return by_levels(params, state, context)
    if spec.max_depth == 0:
      return draft_shape.pending_only(context), state
    return in_one_pass(params, state, context)

  def in_one_pass(params: Params, state: State, context: Context):
    """A draft of a parallel head: the pending token, and masks after it."""
    weights = params.draft["net"], draft_heads.target_weights_of(params)
    depth = spec.max_depth
    behind = ((0, 0), (0, depth - 1))
    stepped, layers = draft_head.step(
      *weights,
      jnp.pad(context.pending, behind, constant_values=-1),
      jnp.pad(state.seed[:, None], (*behind, (0, 0))),
      state.cache.layers,
      attention.view(jnp.maximum(state.cache.length, 0), None, 0, depth),
      0,
      None,
    )

    def finish(logits):
      return draft_heads.spread(draft_head, logits, place)

    _, logits = draft_heads.projected(draft_head, weights, stepped, place, 0)
    draft = mask_slots.draw(context, shape, logits, finish)
    return draft, state._replace(cache=state.cache.replace(layers=layers))

  def by_levels(params: Params, state: State, context: Context):
    weights = params.draft["net"], draft_heads.target_weights_of(params)
    pending, cache = context.pending, state.cache
    if resets:  # an empty cache, and a start before the pending token
      cache = draft_head.init_cache(
        len(pending), kv.num_slots(shape.num_run + 1)
      )
      cache = cache.replace(length=cache.length + 1)

    def view(parents, first: int, count: int) -> View | None:
      if not head_config.num_layers:
        return None
      before = 1 if resets and first == 0 else 0  # the start
      length = jnp.maximum(cache.length, 0) - before
      return attention.view(length, parents, first, before + count)

    def step(carry, tokens, hidden, view, exit_hidden):
      """One call of the head: logits [B, T, V] of what follows, the carry."""
      stepped, layers = draft_head.step(
        *weights, tokens, hidden, carry.layers, view, carry.level, exit_hidden
      )
      stepped, logits = draft_heads.projected(
        draft_head, weights, stepped, place, carry.level
      )
      if carry.hidden is not None:
        stepped = jnp.concatenate([carry.hidden, stepped], axis=1)
      carry = carry._replace(
        level=carry.level + 1, layers=layers, hidden=stepped
      )
      return carry, draft_heads.spread(draft_head, logits, place)

    def run(carry, tokens, parents, first, need_logits):
      """One level: each node goes on from its parent's hidden state."""
      stream, carry = run_exit(params, carry, tokens, parents, first)
      if not need_logits:
        return carry, None
      gap = first - carry.hidden.shape[1]  # leaves, which were not run
      padded = jnp.pad(carry.hidden, ((0, 0), (0, gap), (0, 0)))
      above = parents[..., first:]
      if above.ndim == 1:
        hidden = padded[:, above]
      else:
        hidden = jnp.take_along_axis(padded, above[:, :, None], axis=1)
      seen = view(parents, first, tokens.shape[1])
      return step(carry._replace(hidden=padded), tokens, hidden, seen, stream)

    below = context.target_cache
    below = below.replace(layers=below.layers[: head_config.exit_layer])
    carry = _Carry(0, cache.layers, None, below if exits else None, ())
    stream, carry = run_exit(params, carry, pending, draft_tree.chain(1), 0)
    carry, logits = step(
      carry, pending, state.seed[:, None], view(None, 0, 1), stream
    )
    tree, carry = shape.sample_tree(context, logits[:, 0], run, carry, exits)
    draft = tree.draft
    if exits:
      hidden = None
      if shape.in_place:
        hidden = jnp.concatenate(carry.exit_hidden, axis=1)
      draft = draft._replace(resume=Resume(hidden, carry.target.layers))
    if draft_head.has_kv_cache:
      state = state._replace(cache=cache.replace(layers=carry.layers))
    return draft, state

  def update(params, state: State, context, draft, accept_result, output):
    path, count = accept_result.path, accept_result.num_committed

    def along(x):  # [B, N, ...] to [B, D + 1, ...], the accepted path first
      return jnp.take_along_axis(x, path[:, :, None], axis=1)

    features = tuple(map(along, output.features))
    encoded = draft_head.encode(
      params.draft["net"], ModelOutput(None, along(output.hidden), features)
    )
    seed = _row(encoded, accept_result.num_accepted)
    seed = jnp.where(count[:, None] > 0, seed, state.seed)
    cache = state.cache
    # The accepted tokens are run again, on the target's output before each.
    # Slot `length` is the pending token's, which `propose` ran so, if it was
    # called.
    skipped = max_external_drafts or (shape.policy is not None and not exits)
    done = 0 if skipped else 1
    if draft_head.has_kv_cache and path.shape[1] > done:
      tokens = jnp.take_along_axis(draft.tokens, path, axis=1)[:, done:]
      before = jnp.concatenate([state.seed[:, None], encoded[:, :-1]], axis=1)
      before, length = before[:, done:], cache.length + done
      if draft_head.start:  # the first token of all has no slot
        absent = length < 0
        tokens = jnp.where(absent[:, None], jnp.roll(tokens, -1, 1), tokens)
        rolled = jnp.roll(before, -1, 1)
        before = jnp.where(absent[:, None, None], rolled, before)
        length = jnp.maximum(length, 0)
      _, layers = draft_head.step(
        params.draft["net"],
        draft_heads.target_weights_of(params),
        tokens,
        before,
        cache.layers,
        attention.view(length, None, 0, tokens.shape[1]),
        0,
        features[0][:, done:] if exits else None,
      )
      cache = cache.replace(layers=layers)
    return State(seed, cache.replace(length=cache.length + count))

  spec = spec._replace(
    features=draft_head.features,
    max_external_drafts=max_external_drafts,
    name=head_config.kind,
  )
  idle = None if exits else draft_shape.idle(shape)
  return Drafter(spec, init, propose, update, idle=idle)


def _prefill(draft_head, params, context, output, encoded, cache: KVCache):
  """Layers of the head's KV cache, filled with the prompt in pieces."""
  tokens = context.tokens[:, : encoded.shape[1]]
  before = jnp.pad(encoded, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  if draft_head.start and tokens.shape[1] > 1:
    tokens, before = tokens[:, 1:], before[:, 1:]
  batch, size = tokens.shape
  chunk = min(kv.CHUNK, size)
  target_weights = draft_heads.target_weights_of(params)

  def fill(i, layers):
    # The last piece may begin before the one ahead of it has ended.
    first = jnp.minimum(i * chunk, size - chunk)

    def part(x):
      return jax.lax.dynamic_slice_in_dim(x, first, chunk, axis=1)

    start = jnp.full((batch,), first, jnp.int32)
    return draft_head.step(
      params.draft["net"],
      target_weights,
      part(tokens),
      part(before),
      layers,
      attention.view(start, None, 0, chunk),
      0,
      part(output.features[0]) if draft_head.head_config.exits else None,
    )[1]

  return jax.lax.fori_loop(0, -(-size // chunk), fill, cache.layers)


def _row(x: Array, index: Array) -> Array:
  """x[b, index[b]], [B, W]."""
  return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
