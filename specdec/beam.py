"""Speculative beam search (Leviathan et al., arXiv:2211.17192, appendix A.4).

The `width` beams of a prompt are rows of one batch. Every row drafts for its
beam, one pass of the target verifies all of them, and beam search is then
followed through the verified nodes: a step is right if each beam that it keeps
is a drafted child of one that it kept before. The first step that leaves the
drafts ends the round; its tokens become pending. So every round makes at least
one step of plain beam search, which is the same loop without a drafter, and the
beams and their scores are those of plain beam search, exactly: no drafter can
change them. Rows are permuted at commit alone.

Scores, finished beams and stopping are those of transformers' `generate` with
`num_beams`: all beams start as one, a step weighs (1 + E) width continuations
for E end tokens (two for each beam at least), and the sum of log-probabilities
over length ** length_penalty ranks what is finished.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specdec import cache as kv
from specdec import decode, sampling, step
from specdec.inputs import Inputs, checked
from specdec.traversal import children, drafted, parents_of
from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  NO_DRAFT,
  SIBLINGS,
  TARGET_FAULT,
  AcceptanceRule,
  AcceptResult,
  Array,
  DecodeState,
  Draft,
  Drafter,
  Model,
  Params,
  PyTree,
  RoundOutput,
  Source,
)

_NEVER = -1e9  # the score of what is no beam, as in transformers
_BLOCK = 128  # continuations
STOPPING = (False, True, "never")
# It draws nothing, and any draft will do.
RULE = AcceptanceRule(
  None, None, "coupled", frozenset(SIBLINGS), lossless=True, name="beam search"
)


class Search(NamedTuple):
  """What is searched for; hashable.

  Attributes:
    width: w, beams of a prompt.
    length_penalty: exponent of the length, prompt excluded, by which a finished
      beam's score is divided.
    early_stopping: True: a prompt ends when w beams are finished; False: when
      no running beam would be better if it ended now; 'never': when none could
      become better.
  """

  width: int
  length_penalty: float = 1.0
  early_stopping: bool | str = False


@struct.dataclass
class Finished:
  """The best finished beams of each prompt, best first."""

  tokens: Array  # [B, w, L] prompt and output
  length: Array  # [B, w]
  scores: Array  # [B, w], penalised by length
  done: Array  # [B, w] bool: there is one


@struct.dataclass
class BeamState:
  """Everything a search carries from one round to the next."""

  state: DecodeState  # of B w rows; row b w + i is beam i of prompt b
  scores: Array  # [B, w] sums of log-probabilities of the running beams
  finished: Finished
  improvable: Array  # [B] bool: a running beam may still become one of the best
  begin: Array  # [B] length of the prompts

  @property
  def best(self) -> Finished:
    """The w beams of each prompt: the finished ones; or, of a prompt without
    any, the running ones."""
    batch, width = self.scores.shape
    shape = batch, width, -1
    length = self.state.length.reshape(shape)[..., 0]
    running = Finished(
      self.state.tokens.reshape(shape), length, self.scores, length < 0
    )
    some = self.finished.done.any(axis=1)

    def pick(ours: Array, theirs: Array) -> Array:
      return jnp.where(some.reshape(-1, *[1] * (ours.ndim - 1)), ours, theirs)

    return jax.tree.map(pick, self.finished, running)


class _Walk(NamedTuple):
  """Where beam search stands on the verified nodes of a round."""

  row: Array  # [B, w] the beam, of the round's beginning, whose nodes it is on
  node: Array  # [B, w]
  path: Array  # [B, w, D+1]
  tokens: Array  # [B, w, D+1] chosen after each node of the path
  log_probs: Array  # [B, w, D+1] of them
  scores: Array  # [B, w]
  steps: Array  # [B] made
  going: Array  # [B] bool
  done: Array  # [B] bool
  fault: Array  # [B] int8
  finished: Finished
  improvable: Array  # [B] bool


def _take(x: Array, index: Array) -> Array:
  """Returns x[b, index[b, i]] for x [B, n, ...] and index [B, m]."""
  return jax.vmap(lambda x, i: x[i])(x, index)


def _largest(x: Array, count: int) -> tuple[Array, Array]:
  """Returns the `count` largest of x [B, n], in order, and their columns.

  A vocabulary is long (rule 11): they lie in the blocks whose maxima are the
  largest, and only these are looked into. Of equal ones the first are taken.
  """
  batch, size = x.shape
  blocks = -(-size // _BLOCK)
  if blocks <= count:
    return jax.lax.top_k(x, count)
  padding = ((0, 0), (0, blocks * _BLOCK - size))
  x = jnp.pad(x, padding, constant_values=-jnp.inf)
  x = x.reshape(batch, blocks, _BLOCK)
  _, chosen = jax.lax.top_k(x.max(axis=-1), count)
  chosen = jnp.sort(chosen, axis=1)
  values, index = jax.lax.top_k(_take(x, chosen).reshape(batch, -1), count)
  block = jnp.take_along_axis(chosen, index // _BLOCK, axis=1)
  return values, block * _BLOCK + index % _BLOCK


def _finish(
  finished: Finished, text: Array, length: Array, scores: Array, ends: Array
) -> Finished:
  """Merges candidates [B, w], those that end, into the best finished ones."""
  width = scores.shape[1]
  merged = jax.tree.map(
    lambda *pair: jnp.concatenate(pair, axis=1),
    finished,
    Finished(text, length, jnp.where(ends, scores, _NEVER), ends),
  )
  _, best = jax.lax.top_k(merged.scores, width)
  return jax.tree.map(lambda x: _take(x, best), merged)


def _walk_step(
  search: Search,
  draft: Draft,
  logits: Array,
  state: DecodeState,
  begin: Array,
  eos_ids: Array,
  depth: int,
  walk: _Walk,
) -> _Walk:
  """Makes one step of beam search, for prompts that are going.

  Args:
    draft: [B w, N], its tree in place.
    logits: [B w, N, V].
    state: before the round.
    depth: D, most steps that drafts allow beyond one.
  """
  batch, width = walk.row.shape
  length = state.length.reshape(batch, width)[:, 0] + walk.steps  # committed
  limit = state.limit.reshape(batch, width)[:, 0]
  source = jnp.arange(batch)[:, None] * width + walk.row  # [B, w] rows

  facing = logits[source, walk.node]  # [B, w, V]
  log_probs = jax.nn.log_softmax(facing)
  sound = jnp.all(jnp.isfinite(jax.nn.logsumexp(facing, axis=-1)), axis=1)
  total = (walk.scores[..., None] + log_probs).reshape(batch, -1)
  keep = min(max(2, 1 + len(eos_ids)) * width, total.shape[1])
  scores, index = _largest(total, keep)  # [B, K]
  beam, token = index // facing.shape[-1], index % facing.shape[-1]

  ends = jnp.any(token[..., None] == eos_ids[None, None], axis=-1)
  ends |= (length + 1 >= limit)[:, None]
  # What goes on.
  running = scores + jnp.where(ends, jnp.float32(_NEVER), 0)
  new_scores, chosen = jax.lax.top_k(running, width)
  parent, new_token = (
    jnp.take_along_axis(x, chosen, axis=1) for x in (beam, token)
  )
  turns = jnp.arange(depth + 1)[None, None]
  column = turns == walk.steps[:, None, None]  # [B, 1, D+1]

  def extended(history: Array, parent: Array, new: Array) -> Array:
    return jnp.where(column, new[..., None], _take(history, parent))

  # What is finished: of the best w alone.
  first = slice(0, width)
  texts = _take(state.tokens.reshape(batch, width, -1), walk.row)
  texts = _take(texts, beam[:, first])
  new = extended(walk.tokens, beam[:, first], token[:, first])
  at = length - walk.steps  # [B] where the round's tokens begin
  position = jnp.arange(texts.shape[-1])[None] - at[:, None]  # [B, L]
  inside = (position >= 0) & (position <= walk.steps[:, None])
  written = jnp.clip(position, 0, depth)[:, None]
  written = jnp.take_along_axis(new, jnp.broadcast_to(written, texts.shape), 2)
  texts = jnp.where(inside[:, None], written, texts)
  output = (length + 1 - begin).astype(jnp.float32)[:, None]
  final = scores[:, first] / output**search.length_penalty
  full = jnp.all(walk.finished.done, axis=1) & (search.early_stopping is True)
  may = walk.improvable & ~full
  ended = ends[:, first]
  finished = _finish(
    walk.finished,
    texts,
    jnp.broadcast_to((length + 1)[:, None], ended.shape),
    final,
    ended & may[:, None],
  )
  ahead = (limit - begin) if search.early_stopping == "never" else None
  if ahead is None or search.length_penalty <= 0:
    ahead = length + 1 - begin
  hope = new_scores[:, 0] / ahead.astype(jnp.float32) ** search.length_penalty
  worst = jnp.where(
    finished.done, finished.scores.min(axis=1, keepdims=True), _NEVER
  )
  improvable = walk.improvable & jnp.any(hope[:, None] > worst, axis=1)
  done = ~improvable | jnp.all(ends, axis=1)
  if search.early_stopping is True:
    done |= jnp.all(finished.done, axis=1)

  # The nodes of the beams that go on.
  node = _take(walk.node, parent)
  source = jnp.take_along_axis(source, parent, axis=1)
  flat = jax.tree.map(lambda x: x.reshape(-1), (source, node, new_token))
  there = _children_of(draft, *flat).reshape(batch, width, -1)
  child = jnp.argmax(there, axis=-1)
  drafts = jnp.all(jnp.any(there, axis=-1), axis=1)
  going = walk.going & drafts & ~done & (walk.steps < depth) & sound
  new_path = jnp.where(
    turns > walk.steps[:, None, None],
    child[..., None],
    _take(walk.path, parent),
  )
  gained = new_scores - jnp.take_along_axis(walk.scores, parent, axis=1)
  after = _Walk(
    jnp.take_along_axis(walk.row, parent, axis=1),
    child,
    new_path,
    extended(walk.tokens, parent, new_token),
    extended(walk.log_probs, parent, gained),
    new_scores,
    walk.steps + 1,
    going,
    done,
    walk.fault,
    finished,
    improvable,
  )
  stepping = walk.going & sound
  after = jax.tree.map(
    lambda new, old: jnp.where(
      stepping.reshape(-1, *[1] * (new.ndim - 1)), new, old
    ),
    after,
    walk,
  )
  broken = walk.going & ~sound
  return after._replace(
    going=going,
    done=after.done | broken,
    fault=jnp.where(broken, TARGET_FAULT, after.fault).astype(jnp.int8),
  )


def _children_of(draft: Draft, row: Array, node: Array, token: Array) -> Array:
  """[n, N] bool: the children of a node of row [n] that hold a token."""
  parents = parents_of(draft)[row]
  part = draft._replace(
    tokens=draft.tokens[row],
    parents=parents,
    count=draft.count[row],
    log_probs=None,
    resume=None,
  )
  same = part.tokens == token[:, None]
  return children(part, node) & drafted(part) & same


def _permuted(state: DecodeState, rows: Array, num_nodes: int) -> DecodeState:
  """Returns the state in which row r continues the text of rows[r].

  Noise and counts belong to a place, and beams of one prompt share their source
  and all that limits them.

  Args:
    num_nodes: verified and not yet committed.
  """

  def of(x: PyTree) -> PyTree:
    same = lambda x: x.ndim > 0 and len(x) == len(rows)  # noqa: E731
    return jax.tree.map(lambda x: x[rows] if same(x) else x, x)

  cache = state.target_cache
  return state.replace(
    tokens=of(state.tokens),
    target_cache=kv.permute(cache, rows, cache.length.max() + num_nodes),
    draft_state=of(state.draft_state),
    log_probs=of(state.log_probs),
    draft_log_probs=of(state.draft_log_probs),
    origin=of(state.origin),
  )


def _round(
  target: Model,
  drafter: Drafter,
  search: Search,
  params: Params,
  beams: BeamState,
  eos_ids: Array,
) -> BeamState:
  """One round: every prompt that is not done makes at least one step."""
  spec, rule = drafter.spec, RULE
  draft, state = step.draft_step(target, drafter, rule, params, beams.state)
  beams = beams.replace(state=state)

  def finish(width: int, beams: BeamState) -> BeamState:
    part = spec.with_tree(step.first_nodes(draft, width))
    state = beams.state
    output, state = step.verify_step(target, spec, params.target, state, part)
    depth = min(spec.max_depth, width - 1)
    walk = _walk(search, part, output.logits, beams, eos_ids, depth)
    if search.width > 1:
      rows = jnp.arange(len(walk.steps))[:, None] * search.width + walk.row
      rows = rows.reshape(-1)
      state = _permuted(state, rows, width)
      moved = (part._replace(resume=None), output)
      part, output = jax.tree.map(
        lambda x: x[rows] if isinstance(x, jax.Array) else x, moved
      )
    state = step.commit_step(
      target, drafter, rule, params, state, part, output, *_result(walk, part)
    )
    return beams.replace(
      state=state,
      scores=walk.scores,
      finished=walk.finished,
      improvable=walk.improvable,
    )

  return step.at_width(spec, draft, beams.state.done, finish, beams)


def _walk(
  search: Search,
  draft: Draft,
  logits: Array,
  beams: BeamState,
  eos_ids: Array,
  depth: int,
) -> _Walk:
  """Follows beam search through verified nodes, as far as they go."""
  batch, width = beams.scores.shape
  zeros = jnp.zeros((batch, width), jnp.int32)
  history = jnp.zeros((batch, width, depth + 1), jnp.int32)
  done = beams.state.done.reshape(batch, width)[:, 0]
  walk = _Walk(
    row=zeros + jnp.arange(width)[None],
    node=zeros,
    path=history,
    tokens=history,
    log_probs=history.astype(jnp.float32),
    scores=beams.scores,
    steps=jnp.zeros((batch,), jnp.int32),
    going=~done,
    done=done,
    fault=beams.state.fault.reshape(batch, width)[:, 0],
    finished=beams.finished,
    improvable=beams.improvable,
  )
  return jax.lax.while_loop(
    lambda walk: jnp.any(walk.going),
    lambda walk: _walk_step(
      search, draft, logits, beams.state, beams.begin, eos_ids, depth, walk
    ),
    walk,
  )


def _result(walk: _Walk, draft: Draft) -> tuple[AcceptResult, RoundOutput]:
  """Returns what `step.commit_step` writes into the permuted rows."""
  batch, width, size = walk.path.shape

  def rows(x: Array) -> Array:
    """[B, w, ...] or [B] to [B w, ...]."""
    if x.ndim == 1:
      x = jnp.broadcast_to(x[:, None], (batch, width))
    return x.reshape(batch * width, *x.shape[2:])

  count, tokens = rows(walk.steps), rows(walk.tokens)
  last = jnp.maximum(count - 1, 0)
  ending = jnp.where(draft.count > 1, CORRECTION, BASELINE)
  ending = jnp.where(last == draft.count - 1, BONUS, ending)
  ending = jnp.where(draft.count > 1, ending, BASELINE)
  origin = jnp.where(
    jnp.arange(size)[None] < last[:, None], ACCEPTED, ending[:, None]
  )
  result = AcceptResult(
    path=rows(walk.path),
    num_accepted=last,
    next_token=jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0],
    num_committed=count,
    done=rows(walk.done),
    fault=rows(walk.fault),
  )
  everywhere = jnp.ones(tokens.shape, bool)
  output = RoundOutput(
    tokens=tokens,
    origin=origin.astype(jnp.int8),
    log_probs=rows(walk.log_probs),
    draft_log_probs=jnp.full(tokens.shape, NO_DRAFT, jnp.float32),
    num_accepted=last,
    sound=everywhere,
    draft_sound=everywhere[:, 0],
  )
  return result, output


_STATIC = "target", "drafter", "search"


@functools.partial(jax.jit, static_argnames=(*_STATIC, "max_length"))
@decode.in_32_bits
def start(
  target: Model,
  drafter: Drafter,
  search: Search,
  params: Params,
  inputs: Inputs,
  max_length: int,
) -> BeamState:
  """Prefills the prompts: the state before the first round."""
  batch, width = len(inputs.prompt), search.width

  def prefilled(inputs: Inputs) -> DecodeState:
    options = inputs._asdict() | {"max_length": max_length}
    return decode.start(target, drafter, RULE, params, **options)

  def repeated(x: Array) -> Array:
    return jnp.repeat(x, width, axis=0)

  # Beams are one text so far: each prompt is read once, and what has rows is
  # repeated.
  rows = jax.tree.map(repeated, inputs._replace(key=None))
  shapes = jax.eval_shape(prefilled, rows._replace(key=inputs.key))
  state = jax.tree.map(
    lambda x, shape: x if x.shape == shape.shape else repeated(x),
    prefilled(inputs),
    shapes,
  )
  scores = jnp.zeros((batch, width)).at[:, 1:].set(_NEVER)
  shape = batch, width
  finished = Finished(
    jnp.zeros((*shape, max_length), jnp.int32),
    jnp.zeros(shape, jnp.int32),
    jnp.full(shape, _NEVER, jnp.float32),
    jnp.zeros(shape, bool),
  )
  begin = inputs.prompt_length.astype(jnp.int32)
  improvable = jnp.ones((batch,), bool)
  return BeamState(state, scores, finished, improvable, begin)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("beams",))
@decode.in_32_bits
def run(
  target: Model,
  drafter: Drafter,
  search: Search,
  params: Params,
  beams: BeamState,
  eos_ids: Array,
) -> BeamState:
  """Runs rounds until every prompt is done; donates the state."""
  return jax.lax.while_loop(
    lambda beams: ~jnp.all(beams.state.done),
    lambda beams: _round(target, drafter, search, params, beams, eos_ids),
    beams,
  )


def check(target: Model, search: Search, eos_ids: Sequence[int]) -> None:
  """Refuses what cannot be searched.

  Raises:
    ValueError: width < 1; an unknown early_stopping; a vocabulary smaller than
      what a step weighs.
  """
  if search.width < 1:
    raise ValueError(f"width = {search.width}; it must be >= 1")
  if search.early_stopping not in STOPPING:
    raise ValueError(
      f"early_stopping = {search.early_stopping!r}; accepted: "
      f"{', '.join(map(repr, STOPPING))}"
    )
  if not math.isfinite(search.length_penalty):
    raise ValueError(
      f"length_penalty = {search.length_penalty}; it must be finite"
    )
  most = max(2, 1 + len(eos_ids)) * search.width
  if target.vocab_size < most:
    raise ValueError(
      f"a step of {search.width} beams weighs {most} continuations; the "
      f"vocabulary has {target.vocab_size} tokens"
    )


def beam_search(
  target: Model,
  params: Params,
  prompt: Array,
  prompt_length: Array,
  search: Search,
  *,
  max_length: int,
  drafter: Drafter = decode.NO_DRAFTER,
  eos_ids: Sequence[int] = (),
  limit: Array | None = None,
  source: Source | None = None,
) -> BeamState:
  """Searches the likeliest texts of each prompt, w beams side by side.

  Two compiled programs, `start` and `run`, for a batch shape. The result
  depends on the drafter in its counts of rounds alone.

  Args:
    params: weights of target and, where the drafter has any, of the draft.
    prompt: [B, P] int tokens, each row padded at its end with anything.
    prompt_length: [B], each in 1..P.
    search: how.
    max_length: L, prompt and output together, at most.
    drafter: proposes continuations of every beam. A step is accepted if all
      beams that it keeps are drafted, so trees go further than chains.
    eos_ids: any of these ends a beam; it is emitted.
    limit: [B] length at which beams end; default max_length.
    source: what the encoder of an encoder-decoder reads.

  Returns:
    The last BeamState; `best` has the beams.

  Raises:
    ValueError: as `decode.generate` and `check`.
  """
  check(target, search, eos_ids)
  settings = sampling.settings(len(prompt), 0.0)
  inputs = Inputs(
    prompt, prompt_length, jax.random.key(0), settings, limit, None, source
  )
  inputs, eos_ids = checked(inputs, eos_ids, max_length, target.vocab_size)
  parts = target, drafter, search, params
  return run(*parts, start(*parts, inputs, max_length), eos_ids)
