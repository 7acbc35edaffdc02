"""One round: draft, verify, accept, commit.

Invariants: tokens[b, length[b] - 1] is committed and has no KV yet (rule 1);
every row that is not done grows by at least one token; no cache goes through a
branch (rule 9). Rules give probabilities and draw nothing (rule 8): all noise
of acceptance is drawn here. A round is traversed to its end and truncated
afterwards, so an EOS or a limit never changes what was drawn.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import draft_tree, sampling, stats
from specdec.noise import Noise
from specdec.traversal import (
  TRAVERSALS,
  accept_probs,
  children,
  drafted,
  residuals,
)
from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  DRAFT_FAULT,
  NO_DRAFT,
  NO_FAULT,
  TARGET_FAULT,
  AcceptanceRule,
  AcceptResult,
  Array,
  Context,
  DecodeState,
  Draft,
  Drafter,
  DraftSpec,
  Model,
  ModelOutput,
  Params,
  PyTree,
  RoundOutput,
)
from specdec.utils import loops


@jax.named_scope("draft")
def draft_step(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
) -> tuple[Draft, DecodeState]:
  """Runs the drafter, and puts the cache layers that it wrote in place.

  Of these the draft then has their number alone.

  Raises:
    ValueError: the draft is not what the drafter's spec says.
  """
  context = context_of(state, target.vocab_size, rule)
  draft, draft_state = drafter.propose(params, state.draft_state, context)
  _check_draft(draft, drafter.spec, target.vocab_size)
  _check_shapes(draft, state, target.vocab_size)
  cache = state.target_cache
  if draft.resume is not None:  # its layers are the cache's own, written
    below = draft.resume.layers
    cache = cache.replace(layers=below + cache.layers[len(below) :])
    written = draft.resume._replace(layers=(None,) * len(below))
    draft = draft._replace(resume=written)
  return draft, state.replace(draft_state=draft_state, target_cache=cache)


@jax.named_scope("verify")
def verify_step(
  target: Model,
  spec: DraftSpec,
  params: PyTree,
  state: DecodeState,
  draft: Draft,
) -> tuple[ModelOutput, DecodeState]:
  """Runs the target over a draft: row n of its output is node n's.

  Args:
    params: the target's.
    draft: of spec.max_nodes nodes or the first of them (`first_nodes`).
  """
  _check_shapes(draft, state, target.vocab_size)
  start, hidden = 0, None
  if draft.resume is not None and draft.resume.hidden is not None:
    start, hidden = len(draft.resume.layers), draft.resume.hidden
  output, cache = target.apply(
    params,
    draft.tokens,
    state.target_cache,
    parents=None if spec.chain else spec.with_tree(draft).parents,
    start=start,
    hidden=hidden,
    features=spec.features or (),
  )
  chex.assert_shape(output.logits, (*draft.tokens.shape, target.vocab_size))
  chex.assert_type(output.logits, float)
  chex.assert_tree_shape_prefix(output.features, draft.tokens.shape)
  return output, state.replace(target_cache=cache)


@jax.named_scope("accept")
def accept_step(
  rule: AcceptanceRule,
  spec: DraftSpec,
  draft: Draft,
  logits: Array,
  state: DecodeState,
  eos_ids: Array,
) -> tuple[AcceptResult, RoundOutput]:
  """Warps the target's logits, traverses the draft, draws, and truncates.

  Args:
    logits: [B, N, V] of the target.
    state: before the round.
    eos_ids: [E] tokens that end a row.

  Returns:
    What became of the draft, and the round before it was truncated.
  """
  chex.assert_rank([logits, eos_ids], [3, 1])
  chex.assert_type([logits, eos_ids], [float, int])
  _check_shapes(draft, state, logits.shape[-1])
  target_log_probs = sampling.warp(logits, state.sampling)
  noise = _noise(state, logits.shape[-1], rule)
  depth = min(spec.max_depth, draft.tokens.shape[1] - 1)
  path, round_output = traverse_draft(
    rule, spec.with_tree(draft), logits, target_log_probs, noise, depth
  )
  batch = draft.tokens.shape[0]
  chex.assert_shape([path, *round_output[:4]], (batch, depth + 1))
  return truncate(path, round_output, state, eos_ids), round_output


@jax.named_scope("commit")
def commit_step(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  draft: Draft,
  output: ModelOutput,
  accept_result: AcceptResult,
  round_output: RoundOutput,
) -> DecodeState:
  """Writes a round into the state: text, caches, drafter's state and counts.

  Args:
    state: of `verify_step`.
    output: the target's, on this draft.
    accept_result, round_output: of `accept_step`.
  """
  spec, count = drafter.spec, accept_result.num_committed
  _check_shapes(draft, state, target.vocab_size)
  chex.assert_equal_shape([accept_result.path, *round_output[:4]])
  chex.assert_equal_shape([count, accept_result.num_accepted, state.length])
  context = context_of(state, target.vocab_size, rule)
  draft = spec.with_tree(draft)
  draft_state = drafter.update(
    params, state.draft_state, context, draft, accept_result, output
  )

  def put(buffer, new):
    return append(buffer, new, state.length, count)

  counts = stats.tally(
    state.stats,
    draft,
    round_output,
    accept_result,
    state.limit - state.length,
    spec.widths.index(draft.tokens.shape[1]),
  )
  outcomes = state.outcomes
  if outcomes is not None:
    outcomes = stats.remember(outcomes, draft, state.stats, counts)
  return state.replace(
    tokens=put(state.tokens, round_output.tokens),
    length=state.length + count,
    done=accept_result.done,
    fault=accept_result.fault,
    target_cache=kv.commit(
      state.target_cache, accept_result.path, count, spec.chain
    ),
    draft_state=draft_state,
    stats=counts,
    outcomes=outcomes,
    log_probs=put(state.log_probs, round_output.log_probs),
    draft_log_probs=put(state.draft_log_probs, round_output.draft_log_probs),
    origin=put(state.origin, round_output.origin),
  )


def traverse_draft(
  rule: AcceptanceRule,
  draft: Draft,
  logits: Array,
  target_log_probs: Array,
  noise: Noise,
  depth: int,
) -> tuple[Array, RoundOutput]:
  """Traverses the draft as the rule says and draws the token that follows.

  Args:
    draft: its tree in place (`DraftSpec.with_tree`).
    logits: [B, N, V] of the target.
    target_log_probs: [B, N, V] the same, warped to log-probabilities.
    depth: D, most tokens this draft can have accepted.

  Returns:
    path [B, D+1] and the round's output, nothing truncated yet.
  """
  normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B, N]
  sound = jnp.isfinite(normaliser)
  if rule.traversal in ("last_success", "post_order"):
    # It weighs a draft as a whole, and nothing can follow a node that is not
    # sound: the draft ends with that node's level.
    height = jnp.broadcast_to(draft_tree.depth(draft.parents), sound.shape)
    used = drafted(draft)
    deepest = jnp.min(jnp.where(~sound & used, height, depth), axis=-1)
    used &= height <= deepest[:, None]
    draft = draft._replace(count=jnp.sum(used, axis=-1, dtype=jnp.int32))
  if rule.traversal == "coupled":
    path, num_accepted, next_token = _traverse_coupled(
      draft, target_log_probs, noise, depth
    )
  else:
    path, num_accepted, next_token = _traverse(
      rule, draft, target_log_probs, noise, depth
    )
  step = jnp.arange(depth + 1)
  kept = step[None] < num_accepted[:, None]  # [B, D+1]
  child = jnp.concatenate([path[:, 1:], path[:, -1:]], axis=1)
  # Where the path ends, the distribution that was refused is the first child's.
  next_nodes = children(draft, path) & drafted(draft)[:, None, :]  # [B, D+1, N]
  child = jnp.where(kept, child, jnp.argmax(next_nodes, axis=-1))
  compared = kept | jnp.any(next_nodes, axis=-1)
  tokens = jnp.take_along_axis(draft.tokens, child, axis=1)
  tokens = jnp.where(kept, tokens, next_token[:, None])
  ending = jnp.where(
    jnp.any(next_nodes, axis=-1),
    CORRECTION,
    jnp.where(draft.count[:, None] > 1, BONUS, BASELINE),
  )
  row = jnp.arange(tokens.shape[0])[:, None]
  if draft.log_probs is None:
    same = tokens == jnp.take_along_axis(draft.tokens, child, axis=1)
    drawn = jnp.where(same, 0.0, -jnp.inf)
    draft_sound = jnp.ones_like(draft.count, bool)
  else:
    drawn = draft.log_probs[row, child, tokens]
    # A distribution that is not finite is nan at its own draw, too.
    chosen = draft.tokens[..., None]
    chosen = jnp.take_along_axis(draft.log_probs, chosen, axis=-1)[..., 0]
    draft_sound = ~jnp.any(jnp.isnan(chosen) & drafted(draft), axis=-1)
  round_output = RoundOutput(
    tokens=tokens,
    origin=jnp.where(kept, ACCEPTED, ending).astype(jnp.int8),
    log_probs=logits[row, path, tokens] - normaliser[row, path],
    draft_log_probs=jnp.where(compared, drawn, NO_DRAFT),
    num_accepted=num_accepted,
    sound=sound[row, path],
    draft_sound=draft_sound,
  )
  return path, round_output


def _traverse(rule, draft, target_log_probs, noise, depth):
  """Accepts nodes with the rule's probabilities and takes its path."""
  accept_prob = accept_probs(rule, draft, target_log_probs)
  kept = (noise.accept(accept_prob.shape[1]) < accept_prob) & drafted(draft)
  path, num_accepted, last = TRAVERSALS[rule.traversal].traverse(
    draft, kept, depth
  )
  residual = residuals(rule, draft, target_log_probs, last)
  next_token = sampling.argmax(jnp.log(residual) + noise.next(last))
  return path, num_accepted, next_token


def _traverse_coupled(draft, target_log_probs, noise, depth):
  """Draws the target's token at every node it comes to and follows it."""
  rows = jnp.arange(draft.count.shape[0])

  def step(carry):
    node, path, num_accepted, next_token, alive, d = carry
    token = sampling.argmax(
      target_log_probs[rows, node] + noise.at_position(noise.length + d)
    )
    next_token = jnp.where(alive, token, next_token)
    same = draft.tokens == token[:, None]
    candidates = children(draft, node) & drafted(draft) & same
    alive &= jnp.any(candidates, axis=-1)
    node = jnp.where(alive, jnp.argmax(candidates, axis=-1), node)
    path = jnp.where(jnp.arange(depth + 1)[None] > d, node[:, None], path)
    return node, path, num_accepted + alive, next_token, alive, d + 1

  zero = jnp.zeros_like(draft.count)
  path = jnp.zeros((len(rows), depth + 1), jnp.int32)
  carry = jax.lax.while_loop(
    lambda carry: jnp.any(carry[4]) & (carry[5] <= depth),
    step,
    (zero, path, zero, zero, zero == 0, jnp.int32(0)),
  )
  return carry[1], carry[2], carry[3]


def truncate(
  path: Array, round_output: RoundOutput, state: DecodeState, eos_ids: Array
) -> AcceptResult:
  """Cuts a round at its first EOS and at the limit; nothing of a done row.

  A cut token becomes the pending one, as any last token does. A row is stopped
  before the first token whose distribution is not finite, and with all of a
  draft that was sampled from one.
  """
  step = jnp.arange(path.shape[1])
  ends = jnp.any(round_output.tokens[..., None] == eos_ids[None, None], axis=-1)
  ends &= step[None] <= round_output.num_accepted[:, None]
  before_end = jnp.min(jnp.where(ends, step[None], path.shape[1]), axis=-1)
  count = jnp.minimum(round_output.num_accepted, before_end) + 1
  count = jnp.minimum(count, state.limit - state.length)
  count = jnp.where(state.done, 0, count)
  unsound = jnp.min(jnp.where(round_output.sound, path.shape[1], step), axis=-1)
  fault = jnp.where(unsound < count, TARGET_FAULT, NO_FAULT)
  fault = jnp.where(round_output.draft_sound | (count == 0), fault, DRAFT_FAULT)
  count = jnp.minimum(count, unsound)
  count = jnp.where(fault == DRAFT_FAULT, 0, count)
  last = jnp.maximum(count - 1, 0)
  next_token = jnp.take_along_axis(round_output.tokens, last[:, None], axis=1)
  done = state.done | (before_end < count)
  done |= (state.length + count >= state.limit) | (fault != NO_FAULT)
  fault = jnp.where(state.done, state.fault, fault).astype(jnp.int8)
  return AcceptResult(path, last, next_token[:, 0], count, done, fault)


def append(buffer: Array, new: Array, start: Array, count: Array) -> Array:
  """Writes new[b, :count[b]] to buffer[b] from start[b] on, and no more."""
  step = jnp.arange(new.shape[1])
  index = jnp.where(
    step[None] < count[:, None], start[:, None] + step[None], buffer.shape[1]
  )
  rows = jnp.arange(buffer.shape[0])[:, None]
  return buffer.at[rows, index].set(new.astype(buffer.dtype), mode="drop")


def context_of(
  state: DecodeState, vocab_size: int, rule: AcceptanceRule
) -> Context:
  """What the drafter may see of this state."""
  noise = _noise(state, vocab_size, rule)
  return Context(
    state.tokens,
    state.length,
    state.sampling,
    state.target_cache,
    noise.draft,
    state.source,
    state.done,
    state.outcomes,
  )


def _noise(state, vocab_size, rule) -> Noise:
  return Noise(
    keys=state.keys,
    length=state.length,
    vocab_size=vocab_size,
    coupled=rule.traversal == "coupled",
    wanted=jnp.any(state.sampling.temperature > 0),
  )


def first_nodes(draft: Draft, width: int) -> Draft:
  """Returns the first `width` nodes of a draft."""
  if width == draft.tokens.shape[1]:
    return draft
  resume = draft.resume
  if resume is not None and resume.hidden is not None:
    resume = resume._replace(hidden=resume.hidden[:, :width])
  return draft._replace(
    tokens=draft.tokens[:, :width],
    parents=None if draft.parents is None else draft.parents[..., :width],
    log_probs=None if draft.log_probs is None else draft.log_probs[:, :width],
    resume=resume,
    certainty=None if draft.certainty is None else draft.certainty[:, :width],
  )


def decode_step(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  eos_ids: Array,
) -> DecodeState:
  """One round: every row that is not done grows by at least one token.

  The draft runs at the smallest static width that holds it (`at_width`).
  """

  def finish(state, draft, output, rest):
    outcome = accept_step(
      rule, drafter.spec, draft, output.logits, state, eos_ids
    )
    state = commit_step(
      target, drafter, rule, params, state, draft, output, *outcome
    )
    return state, rest

  return draft_and_verify(target, drafter, rule, params, state, finish)[0]


def draft_and_verify(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  finish: Callable[..., tuple[DecodeState, PyTree]],
  rest: PyTree = None,
) -> tuple[DecodeState, PyTree]:
  """A round up to verification; what is left of it is `finish`.

  Args:
    finish: (state, draft, output, rest) -> (state, rest) accepts nodes of the
      draft, the first of it that hold it, and commits.
    rest: what else a loop carries from round to round.

  Raises:
    ValueError: the caches have no room for the drafter's nodes, or it has idle
      rounds and no width for them.
  """
  spec = drafter.spec
  kv.check_tokens(target, spec.max_nodes, "the target")
  _check_room(state, spec)

  def verified(width: int, carry, draft: Draft):
    state, rest = carry
    part = first_nodes(draft, width)
    output, state = verify_step(target, spec, params.target, state, part)
    return finish(state, part, output, rest)

  def drafted(carry, _=None):
    state, rest = carry
    draft, state = draft_step(target, drafter, rule, params, state)
    return at_width(spec, draft, state.done, verified, (state, rest))

  def alone(carry, _):
    context = context_of(carry[0], target.vocab_size, rule)
    return verified(1, carry, pending_only(context, spec))

  if drafter.idle is None:
    return drafted((state, rest))
  if 1 not in spec.widths or spec.parents is None:
    raise ValueError(
      f"{spec.name} has idle rounds: 1 must be among its widths {spec.widths}, "
      "and its tree stand in its spec"
    )
  idle = drafter.idle(context_of(state, target.vocab_size, rule))
  carry = loops.when(~idle, drafted, (state, rest), ())
  return loops.when(idle, alone, carry, ())


def pending_only(context: Context, spec: DraftSpec) -> Draft:
  """Returns the draft of the pending token alone, of a drafter that drafts."""
  log_probs = None
  if spec.siblings != "deterministic":
    log_probs = jnp.zeros((*context.pending.shape, context.vocab_size))
  return Draft(context.pending, None, log_probs, jnp.ones_like(context.length))


def at_width(
  spec: DraftSpec,
  draft: Draft,
  done: Array,
  finish: Callable[[int, PyTree, Draft], PyTree],
  state: PyTree,
) -> PyTree:
  """Returns finish(width, state, draft), at the smallest width that holds the
  draft."""
  if len(spec.widths) == 1:
    return finish(spec.max_nodes, state, draft)
  needed = jnp.max(jnp.where(done, 1, draft.count))
  choice = jnp.sum(needed > jnp.asarray(spec.widths[:-1]))
  for index, width in enumerate(spec.widths):
    run = functools.partial(finish, width)
    state = loops.when(choice == index, run, state, draft)
  return state


def _check_shapes(draft: Draft, state: DecodeState, vocab_size: int) -> None:
  """Asserts that a draft is one for this batch and vocabulary."""
  batch, nodes = draft.tokens.shape
  chex.assert_shape([state.length, draft.count], (batch,))
  chex.assert_type([draft.tokens, draft.count], int)
  if draft.parents is not None:
    chex.assert_shape(draft.parents, (..., nodes))
    chex.assert_type(draft.parents, int)
  if draft.log_probs is not None:
    chex.assert_shape(draft.log_probs, (batch, nodes, vocab_size))
    chex.assert_type(draft.log_probs, float)
  if draft.resume is not None and draft.resume.hidden is not None:
    chex.assert_shape(draft.resume.hidden, (batch, nodes, None))


def _check_draft(draft: Draft, spec: DraftSpec, vocab_size: int) -> None:
  if draft.tokens.shape[1] != spec.max_nodes:
    raise ValueError(
      f"{spec.name} gave {draft.tokens.shape[1]} nodes; its spec says "
      f"max_nodes = {spec.max_nodes}"
    )
  if (draft.parents is None) != (spec.parents is not None):
    raise ValueError(
      f"the tree of {spec.name} must stand in its spec, or in every draft: "
      f"spec.parents = {spec.parents}, Draft.parents = {draft.parents}"
    )
  silent = draft.log_probs is None
  if silent != (spec.siblings == "deterministic") and spec.max_nodes > 1:
    raise ValueError(
      f"{spec.name} handed over "
      f"{'no distribution' if silent else 'a distribution'} of its "
      f"draft tokens, and its spec says siblings = {spec.siblings!r}"
    )
  if draft.log_probs is not None and draft.log_probs.shape[-1] != vocab_size:
    raise ValueError(
      f"the distribution of {spec.name} is over {draft.log_probs.shape[-1]} "
      f"tokens and the target's over {vocab_size}; they must share one "
      "vocabulary"
    )


def _check_room(state: DecodeState, spec: DraftSpec) -> None:
  slots, size = state.target_cache.num_slots, state.tokens.shape[1]
  if slots < size + spec.max_nodes:
    raise ValueError(
      f"the cache has {slots} slots; {size} tokens and a draft of "
      f"{spec.max_nodes} nodes need {size + spec.max_nodes}: start with the "
      "drafter that runs"
    )
