"""Follows beam search through the verified nodes of a round.

A step of beam search is made for all beams of a prompt. It stays on the nodes
as long as each beam that it keeps is a drafted child of one that it kept
before; the first step that leaves them is the last. No text is read or moved:
a beam is a row of the round's beginning and the tokens that it got since.

Letters in shape comments: B prompts, w beams of each, K continuations that a
step weighs, N nodes of a draft, D its depth, V vocabulary, L token buffer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specdec.beam_step import (
  Continuations,
  Ranking,
  Search,
  continuations,
  going_on,
  is_done,
  penalised,
  ranked,
  take,
)
from specdec.traversal import children, drafted, parents_of
from specdec.types import (
  ACCEPTED,
  BASELINE,
  BONUS,
  CORRECTION,
  NO_DRAFT,
  TARGET_FAULT,
  AcceptResult,
  Array,
  DecodeState,
  Draft,
  PyTree,
  RoundOutput,
)


@struct.dataclass
class Finished:
  """The best finished beams of each prompt, best first."""

  tokens: Array  # [B, w, L] prompt and output
  length: Array  # [B, w]; 0: there is none
  scores: Array  # [B, w], penalised by length
  done: Array  # [B, w] bool: there is one


@struct.dataclass
class BeamState:
  """Everything a search carries from one round to the next."""

  state: DecodeState  # of B w rows; row b w + i is beam i of prompt b
  scores: Array  # [B, w] sums of log-probabilities of the running beams
  finished: Finished
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
    return _where(some, self.finished, running)


class Verified(NamedTuple):
  """What the steps of a round read and leave as it is."""

  draft: Draft  # [B w, N], its tree in place
  logits: Array  # [B w, N, V] of the target
  eos_ids: Array  # [E]
  begin: Array  # [B] length of the prompts
  length: Array  # [B] of the running beams before the round
  limit: Array  # [B]


class Traversal(NamedTuple):
  """Where beam search is among the verified nodes of a round."""

  beam: Array  # [B, w] running beam of before the round whose nodes it is on
  node: Array  # [B, w]
  path: Array  # [B, w, D+1] nodes, the last one repeated
  tokens: Array  # [B, w, D+1] chosen after each node of the path
  log_probs: Array  # [B, w, D+1] of them
  scores: Array  # [B, w]
  ranking: Ranking
  steps: Array  # [B] made
  going: Array  # [B] bool
  done: Array  # [B] bool
  fault: Array  # [B] int8


def traverse(
  search: Search,
  draft: Draft,
  logits: Array,
  beams: BeamState,
  eos_ids: Array,
  depth: int,
) -> Traversal:
  """Makes steps of beam search as far as the verified nodes go.

  Args:
    draft: [B w, N], its tree in place.
    logits: [B w, N, V].
    beams: before the round.
    eos_ids: [E] tokens that end a beam.
    depth: D, most steps that drafts allow beyond one.
  """
  (batch, width), state = beams.scores.shape, beams.state
  # Of the prompts: their rows agree.
  length, limit, done, fault = (
    x.reshape(batch, width)[:, 0]
    for x in (state.length, state.limit, state.done, state.fault)
  )
  verified = Verified(draft, logits, eos_ids, beams.begin, length, limit)
  beam = jnp.broadcast_to(jnp.arange(width), (batch, width))
  history = jnp.zeros((batch, width, depth + 1), jnp.int32)
  finished = beams.finished
  ranking = Ranking(
    beam, history, finished.length, finished.scores, finished.done
  )
  traversal = Traversal(
    beam=beam,
    node=jnp.zeros_like(beam),
    path=history,
    tokens=history,
    log_probs=history.astype(jnp.float32),
    scores=beams.scores,
    ranking=ranking,
    steps=jnp.zeros_like(length),
    going=~done,
    done=done,
    fault=fault,
  )
  return jax.lax.while_loop(
    lambda traversal: jnp.any(traversal.going),
    lambda traversal: _step(search, verified, traversal),
    traversal,
  )


def _step(
  search: Search, verified: Verified, traversal: Traversal
) -> Traversal:
  """Makes one step, for the prompts that are going."""
  draft, width = verified.draft, search.width
  length = verified.length + traversal.steps + 1  # [B] of the new beams
  row = rows_of(traversal.beam)
  log_probs = jax.nn.log_softmax(verified.logits[row, traversal.node])
  sound = jnp.all(jnp.isfinite(jnp.max(log_probs, axis=-1)), axis=1)
  weighed = continuations(
    log_probs,
    traversal.scores,
    search.num_weighed(len(verified.eos_ids)),
    verified.eos_ids,
    length >= verified.limit,
  )
  running = going_on(weighed, width)
  best = jax.tree.map(lambda x: x[:, :width], weighed)
  output = length - verified.begin
  new = _candidates(search, traversal, best, length, output)
  ranking = ranked(traversal.ranking, new)
  most = verified.limit - verified.begin
  done = is_done(search, ranking, running, output, most)
  done |= jnp.all(weighed.ends, axis=1)
  child, is_drafted = _drafted_children(
    draft,
    jnp.take_along_axis(row, running.beam, axis=1),
    jnp.take_along_axis(traversal.node, running.beam, axis=1),
    running.token,
  )
  inside = traversal.steps + 1 < traversal.path.shape[-1]
  after = _advanced(traversal, running, child)._replace(
    ranking=ranking,
    going=jnp.all(is_drafted, axis=1) & ~done & inside,
    done=done,
  )
  broken = traversal._replace(
    going=jnp.zeros_like(done),
    done=jnp.ones_like(done),
    fault=jnp.full_like(traversal.fault, TARGET_FAULT),
  )
  after = _where(sound, after, broken)
  return _where(traversal.going, after, traversal)


def _candidates(
  search: Search,
  traversal: Traversal,
  best: Continuations,
  length: Array,
  output: Array,
) -> Ranking:
  """Returns the w best continuations, as if each were finished if it ends.

  Args:
    best: [B, w]; an end token further down finishes nothing.
    length, output: [B] of the continuations, with and without their prompts.
  """
  return Ranking(
    beam=search.width + jnp.take_along_axis(traversal.beam, best.beam, axis=1),
    tokens=_extended(traversal.tokens, traversal.steps, best.beam, best.token),
    length=jnp.broadcast_to(length[:, None], best.ends.shape),
    scores=penalised(best.scores, output, search),
    done=best.ends,
  )


def _drafted_children(
  draft: Draft, row: Array, node: Array, token: Array
) -> tuple[Array, Array]:
  """Finds the child of a node that holds a token.

  Args:
    draft: [B w, N].
    row, node, token: [B, w].

  Returns:
    The child [B, w], and whether there is one.
  """
  match = parents_of(draft)[row] == node[..., None]  # [B, w, N]
  match &= (draft.tokens[row] == token[..., None]) & drafted(draft)[row]
  return jnp.argmax(match, axis=-1), jnp.any(match, axis=-1)


def _advanced(
  traversal: Traversal, running: Continuations, child: Array
) -> Traversal:
  """Returns where the running beams are, a step further, at `child` [B, w]."""
  steps, parent = traversal.steps, running.beam
  column = jnp.arange(traversal.path.shape[-1])[None, None]
  path = jnp.where(
    column > steps[:, None, None],
    child[..., None],
    take(traversal.path, parent),
  )
  return traversal._replace(
    beam=jnp.take_along_axis(traversal.beam, parent, axis=1),
    node=child,
    path=path,
    tokens=_extended(traversal.tokens, steps, parent, running.token),
    log_probs=_extended(traversal.log_probs, steps, parent, running.log_prob),
    scores=running.scores,
    steps=steps + 1,
  )


def _extended(history: Array, steps: Array, parent: Array, new: Array) -> Array:
  """Returns the histories of chosen beams with what is new in this step.

  Args:
    history: [B, w, D+1].
    steps: [B] made: the column of what is new.
    parent, new: [B, m].

  Returns:
    [B, m, D+1].
  """
  column = jnp.arange(history.shape[-1])[None, None]
  return jnp.where(
    column == steps[:, None, None], new[..., None], take(history, parent)
  )


def rows_of(beam: Array) -> Array:
  """Returns the rows of the batch of beams [B, m]."""
  batch, width = beam.shape
  return jnp.arange(batch)[:, None] * width + beam


def _where(chosen: Array, x: PyTree, y: PyTree) -> PyTree:
  """Returns x, leaves [B, ...], where chosen [B], y elsewhere."""

  def of(x: Array, y: Array) -> Array:
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y)

  return jax.tree.map(of, x, y)


def result_of(
  traversal: Traversal, draft: Draft
) -> tuple[AcceptResult, RoundOutput]:
  """Returns what `step.commit_step` writes into the permuted rows [B w]."""
  batch, width, size = traversal.path.shape

  def rows(x: Array) -> Array:
    """[B, w, ...] or [B] to [B w, ...]."""
    if x.ndim == 1:
      x = jnp.broadcast_to(x[:, None], (batch, width))
    return x.reshape(batch * width, *x.shape[2:])

  count, tokens = rows(traversal.steps), rows(traversal.tokens)
  last = jnp.maximum(count - 1, 0)
  end = jnp.take_along_axis(rows(traversal.path), last[:, None], axis=1)[:, 0]
  has_children = jnp.any(children(draft, end) & drafted(draft), axis=-1)
  ending = jnp.where(has_children, CORRECTION, BONUS)
  ending = jnp.where(draft.count > 1, ending, BASELINE)
  origin = jnp.where(
    jnp.arange(size)[None] < last[:, None], ACCEPTED, ending[:, None]
  )
  result = AcceptResult(
    path=rows(traversal.path),
    num_accepted=last,
    next_token=jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0],
    num_committed=count,
    done=rows(traversal.done),
    fault=rows(traversal.fault),
  )
  everywhere = jnp.ones(tokens.shape, bool)
  output = RoundOutput(
    tokens=tokens,
    origin=origin.astype(jnp.int8),
    log_probs=rows(traversal.log_probs),
    draft_log_probs=jnp.full(tokens.shape, NO_DRAFT, jnp.float32),
    num_accepted=last,
    sound=everywhere,
    draft_sound=everywhere[:, 0],
  )
  return result, output
