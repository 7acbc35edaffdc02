"""A learned drafter at work: a cell behind the three functions of a Drafter.

Invariant: after `init` and every `update` the drafter's own cache holds every
committed token but the pending one, each made from what the target itself said
before it, and `seed` is what the target said last. So rounds of any length,
undrafted ones too, leave nothing to catch up with. Draft tokens fill scratch
slots past `length`; the accepted ones are run again on the target's own
streams.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_shape, draft_tree, sharding
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.draft_head import DraftHead, view_of
from specdec.types import (
  AcceptResult,
  Array,
  Context,
  Draft,
  Drafter,
  KVCache,
  Model,
  ModelOutput,
  Params,
  Resume,
)


class State(NamedTuple):
  """What a learned drafter carries from round to round."""

  seed: Array  # [B, W'] `read` of the token before the pending one; 0: none
  cache: KVCache  # length [B]: committed tokens but the pending one


def drafter(
  draft_head: DraftHead,
  target: Model,
  expansion: draft_shape.DraftShape,
  place: sharding.Placement | None = None,
  max_external_drafts: int = 0,
) -> Drafter:
  """Drafts the draft shape's shape, a chain or a tree, a level in one call.

  Weights: params.draft as `cell.weights_of` makes it.

  Args:
    target: the very model that verifies.
    place: the target's, on a mesh: distributions are split as its own are.
    max_external_drafts: of DraftSpec; to stand behind drafters.fallback.

  Raises:
    ValueError: the shape is deeper than the drafter's heads, an exit's tree
      runs more nodes than it keeps (they share the target's scratch), or an
      exit is to have max_external_drafts: verification goes on from its own
        draft tokens.
  """
  head_config, spec = draft_head.head_config, expansion.spec
  depth, num_nodes = spec.max_depth, spec.max_nodes
  if head_config.most_levels is not None and depth > head_config.most_levels:
    raise ValueError(
      f"{depth} levels of draft tokens; this {head_config.kind} has "
      f"{head_config.most_levels} heads, one a level"
    )
  exits = head_config.exits
  if exits:
    draft_shape.check_scratch(expansion)
    if max_external_drafts:
      raise ValueError(
        "an early exit cannot stand behind another drafter: verification goes "
        "on from what it made of its own draft tokens"
      )
  place = place or sharding.anywhere

  def init(params: Params, context: Context, output: ModelOutput | None):
    batch, size = context.tokens.shape
    net = params.draft["net"]
    encoded = draft_head.encode(
      net, output
    )  # [B, P, W'] after tokens 0 .. P - 1
    last = context.length - 2
    seed = _row(encoded, jnp.maximum(last, 0))
    seed = jnp.where(last[:, None] >= 0, seed, 0)
    if not draft_head.has_kv_cache:
      return State(seed, KVCache((), context.length - 1))
    prompt = encoded.shape[1]
    chunk = min(kv.CHUNK, prompt)
    scratch = max(expansion.num_run, max(depth, max_external_drafts) + 1)
    cache = draft_head.init_cache(batch, kv.num_slots(size + scratch))
    before = jnp.pad(encoded, ((0, 0), (1, 0), (0, 0)))[:, :prompt]
    pieces = -(-prompt // chunk)
    target_weights = draft_heads.target_weights_of(params)

    def fill(i, layers):
      # The last piece may begin before the one ahead of it has ended.
      first = jnp.minimum(i * chunk, prompt - chunk)

      def part(x):
        return jax.lax.dynamic_slice_in_dim(x, first, chunk, axis=1)

      start = jnp.full((batch,), first, jnp.int32)
      view = view_of(start, None, 0, chunk, cache.num_slots)
      exit_hidden = part(output.features[0]) if exits else None
      return draft_head.step(
        net,
        target_weights,
        part(context.tokens[:, :prompt]),
        part(before),
        layers,
        view,
        0,
        exit_hidden,
      )[1]

    layers = jax.lax.fori_loop(0, pieces, fill, cache.layers)
    return State(seed, KVCache(layers, context.length - 1))

  def propose(params: Params, state: State, context: Context):
    net, target_weights = (
      params.draft["net"],
      draft_heads.target_weights_of(params),
    )
    batch = context.length.shape[0]
    pending = context.pending
    base, layers = state.cache.length, state.cache.layers
    slots = state.cache.num_slots if draft_head.has_kv_cache else 0
    below = context.target_cache
    if exits:
      below = below.replace(layers=below.layers[: head_config.exit_layer])
    exit_hiddens, hiddens = [], []

    def run_exit(tokens, parents, first):
      """What the target's first layers make of these nodes."""
      nonlocal below
      if not exits:
        return None
      output, below = target.apply(
        params.target,
        tokens,
        below,
        parents=parents,
        first=first,
        stop=head_config.exit_layer,
        head=False,
        features=(head_config.exit_layer,),
      )
      exit_hiddens.append(output.features[0])
      return output.features[0]

    def logits_of(level):
      full = draft_heads.spread(
        draft_head, draft_head.logits(net, target_weights, hiddens[-1], level)
      )
      return place(full, "rows", None, "vocab")

    def begin():
      """The pending token, node 0."""
      nonlocal layers, base, slots
      view = None
      if (
        head_config.resets_each_round
      ):  # a start and the pending token, in an empty cache
        slots = kv.num_slots(expansion.num_run + 1)
        layers = draft_head.init_cache(batch, slots).layers
        view = view_of(jnp.zeros_like(base), None, 0, 2, slots)
        base = jnp.ones_like(base)
      elif draft_head.has_kv_cache:
        view = view_of(base, None, 0, 1, slots)
      exit_hidden = run_exit(pending, draft_tree.chain(1), 0)
      seed = state.seed[:, None]
      made, layers = draft_head.step(
        net, target_weights, pending, seed, layers, view, 0, exit_hidden
      )
      hiddens.append(made)

    level = 0

    def run(tokens, parents, first, wanted):
      """One level: each node goes on from its parent's stream."""
      nonlocal layers, level
      level += 1
      exit_hidden = run_exit(tokens, parents, first)
      if not wanted:
        return None
      known = jnp.concatenate(hiddens, axis=1)
      if known.shape[1] < first:  # leaves of the last level: not run
        gap = ((0, 0), (0, first - known.shape[1]), (0, 0))
        known = jnp.pad(known, gap)
        hiddens[:] = [known]
      above = parents[..., first:]
      if above.ndim == 1:
        given = known[:, above]
      else:
        given = jnp.take_along_axis(known, above[:, :, None], axis=1)
      view = None
      if head_config.num_layers:
        view = view_of(base, parents, first, tokens.shape[1], slots)
      made, layers = draft_head.step(
        net, target_weights, tokens, given, layers, view, level, exit_hidden
      )
      hiddens.append(made)
      return logits_of(level)

    begin()
    grown = expansion.sample_tree(context, logits_of(0)[:, 0], run, exits)
    resume = None
    if exits:
      hidden = None
      if expansion.in_place:
        hidden = jnp.concatenate(exit_hiddens, axis=1)
      resume = Resume(hidden, below.layers)
    count = jnp.full_like(context.length, num_nodes)
    draft = Draft(grown.tokens, grown.parents, grown.log_probs, count, resume)
    if draft_head.has_kv_cache:
      state = state._replace(cache=state.cache.replace(layers=layers))
    return draft, state

  def update(
    params: Params,
    state: State,
    context: Context,
    draft: Draft,
    accept_result: AcceptResult,
    output: ModelOutput,
  ):
    del context
    net = params.draft["net"]
    kept = accept_result.num_committed

    def along(x):  # [B, N, ...] to [B, D + 1, ...], the accepted path first
      return jnp.take_along_axis(x, accept_result.path[:, :, None], axis=1)

    encoded = draft_head.encode(
      net,
      output._replace(
        logits=None,
        hidden=along(output.hidden),
        features=tuple(along(x) for x in output.features),
      ),
    )
    seed = _row(encoded, accept_result.num_accepted)
    seed = jnp.where(kept[:, None] > 0, seed, state.seed)
    cache = state.cache
    # What was accepted, run again on what the target said before it. Slot
    # `length` is the pending token's, which `propose` ran so, if it was called.
    done = 0 if max_external_drafts else 1
    if draft_head.has_kv_cache and accept_result.path.shape[1] > done:
      tokens = jnp.take_along_axis(draft.tokens, accept_result.path, axis=1)[
        :, done:
      ]
      before = jnp.concatenate([state.seed[:, None], encoded[:, :-1]], axis=1)
      view = view_of(
        cache.length + done, None, 0, tokens.shape[1], cache.num_slots
      )
      exit_hidden = along(output.features[0])[:, done:] if exits else None
      _, layers = draft_head.step(
        net,
        draft_heads.target_weights_of(params),
        tokens,
        before[:, done:],
        cache.layers,
        view,
        0,
        exit_hidden,
      )
      cache = cache.replace(layers=layers)
    return State(seed, cache.replace(length=cache.length + kept))

  spec = spec._replace(
    features=draft_head.features, max_external_drafts=max_external_drafts
  )
  return Drafter(spec, init, propose, update)


def _row(x: Array, index: Array) -> Array:
  """x[b, index[b]], [B, W]."""
  return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
