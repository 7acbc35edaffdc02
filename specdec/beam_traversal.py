"""Follows beam search through the verified nodes of a round.

A step of beam search is made for all beams of a prompt. It stays on the nodes
as long as each beam that it keeps is a drafted child of one that it kept
before; the first step that leaves them is the last.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

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
  RoundOutput,
)

NEVER = -1e9  # the score of what is no beam, as in transformers
_BLOCK = 128  # continuations


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


class Traversal(NamedTuple):
  """Where beam search is among the verified nodes of a round."""

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
    depth: D, most steps that drafts allow beyond one.
  """
  batch, width = beams.scores.shape
  zeros = jnp.zeros((batch, width), jnp.int32)
  history = jnp.zeros((batch, width, depth + 1), jnp.int32)
  done = beams.state.done.reshape(batch, width)[:, 0]
  traversal = Traversal(
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
    lambda traversal: jnp.any(traversal.going),
    lambda traversal: _step(
      search, draft, logits, beams, eos_ids, depth, traversal
    ),
    traversal,
  )


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
    Finished(text, length, jnp.where(ends, scores, NEVER), ends),
  )
  _, best = jax.lax.top_k(merged.scores, width)
  return jax.tree.map(lambda x: _take(x, best), merged)


def _step(
  search: Search,
  draft: Draft,
  logits: Array,
  beams: BeamState,
  eos_ids: Array,
  depth: int,
  traversal: Traversal,
) -> Traversal:
  """Makes one step, for prompts that are going; arguments as `traverse`."""
  batch, width = traversal.row.shape
  state, begin = beams.state, beams.begin
  committed = state.length.reshape(batch, width)[:, 0]  # before the round
  length = committed + traversal.steps
  limit = state.limit.reshape(batch, width)[:, 0]
  source = jnp.arange(batch)[:, None] * width + traversal.row  # [B, w] rows

  facing = logits[source, traversal.node]  # [B, w, V]
  log_probs = jax.nn.log_softmax(facing)
  sound = jnp.all(jnp.isfinite(jax.nn.logsumexp(facing, axis=-1)), axis=1)
  total = (traversal.scores[..., None] + log_probs).reshape(batch, -1)
  keep = min(max(2, 1 + len(eos_ids)) * width, total.shape[1])
  scores, index = _largest(total, keep)  # [B, K]
  beam, token = index // facing.shape[-1], index % facing.shape[-1]

  ends = jnp.any(token[..., None] == eos_ids[None, None], axis=-1)
  ends |= (length + 1 >= limit)[:, None]
  # What goes on.
  running = scores + jnp.where(ends, jnp.float32(NEVER), 0)
  new_scores, chosen = jax.lax.top_k(running, width)
  parent, new_token = (
    jnp.take_along_axis(x, chosen, axis=1) for x in (beam, token)
  )
  turns = jnp.arange(depth + 1)[None, None]
  column = turns == traversal.steps[:, None, None]  # [B, 1, D+1]

  def extended(history: Array, parent: Array, new: Array) -> Array:
    return jnp.where(column, new[..., None], _take(history, parent))

  # What is finished: of the best w alone.
  first = slice(0, width)
  texts = _take(state.tokens.reshape(batch, width, -1), traversal.row)
  texts = _take(texts, beam[:, first])
  new = extended(traversal.tokens, beam[:, first], token[:, first])
  position = jnp.arange(texts.shape[-1])[None] - committed[:, None]  # [B, L]
  inside = (position >= 0) & (position <= traversal.steps[:, None])
  written = jnp.clip(position, 0, depth)[:, None]
  written = jnp.take_along_axis(new, jnp.broadcast_to(written, texts.shape), 2)
  texts = jnp.where(inside[:, None], written, texts)
  output = (length + 1 - begin).astype(jnp.float32)[:, None]
  final = scores[:, first] / output**search.length_penalty
  full = jnp.all(traversal.finished.done, axis=1) & (
    search.early_stopping is True
  )
  may = traversal.improvable & ~full
  ended = ends[:, first]
  finished = _finish(
    traversal.finished,
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
    finished.done, finished.scores.min(axis=1, keepdims=True), NEVER
  )
  improvable = traversal.improvable & jnp.any(hope[:, None] > worst, axis=1)
  done = ~improvable | jnp.all(ends, axis=1)
  if search.early_stopping is True:
    done |= jnp.all(finished.done, axis=1)

  # The nodes of the beams that go on.
  node = _take(traversal.node, parent)
  source = jnp.take_along_axis(source, parent, axis=1)
  flat = jax.tree.map(lambda x: x.reshape(-1), (source, node, new_token))
  there = _children_of(draft, *flat).reshape(batch, width, -1)
  child = jnp.argmax(there, axis=-1)
  drafts = jnp.all(jnp.any(there, axis=-1), axis=1)
  going = traversal.going & drafts & ~done & (traversal.steps < depth) & sound
  new_path = jnp.where(
    turns > traversal.steps[:, None, None],
    child[..., None],
    _take(traversal.path, parent),
  )
  gained = new_scores - jnp.take_along_axis(traversal.scores, parent, axis=1)
  after = Traversal(
    jnp.take_along_axis(traversal.row, parent, axis=1),
    child,
    new_path,
    extended(traversal.tokens, parent, new_token),
    extended(traversal.log_probs, parent, gained),
    new_scores,
    traversal.steps + 1,
    going,
    done,
    traversal.fault,
    finished,
    improvable,
  )
  stepping = traversal.going & sound
  after = jax.tree.map(
    lambda new, old: jnp.where(
      stepping.reshape(-1, *[1] * (new.ndim - 1)), new, old
    ),
    after,
    traversal,
  )
  broken = traversal.going & ~sound
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


def result_of(
  traversal: Traversal, draft: Draft
) -> tuple[AcceptResult, RoundOutput]:
  """Returns what `step.commit_step` writes into the permuted rows."""
  batch, width, size = traversal.path.shape

  def rows(x: Array) -> Array:
    """[B, w, ...] or [B] to [B w, ...]."""
    if x.ndim == 1:
      x = jnp.broadcast_to(x[:, None], (batch, width))
    return x.reshape(batch * width, *x.shape[2:])

  count, tokens = rows(traversal.steps), rows(traversal.tokens)
  last = jnp.maximum(count - 1, 0)
  ending = jnp.where(draft.count > 1, CORRECTION, BASELINE)
  ending = jnp.where(last == draft.count - 1, BONUS, ending)
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
