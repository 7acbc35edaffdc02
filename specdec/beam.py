"""Speculative beam search (Leviathan et al., arXiv:2211.17192, appendix A.4).

The `width` beams of a prompt are rows of one batch. Every row drafts for its
beam, one pass of the target verifies all of them, and beam search is then
followed through the verified nodes: a step is right if each beam that it keeps
is a drafted child of one that it kept before. The first step that leaves the
drafts ends the round; its tokens become pending. So every round makes at least
one step of plain beam search, which is the same loop without a drafter, and no
drafter changes what is found: scores agree to the rounding of float32, in which
a pass of several nodes and a pass of one differ, and so do the beams, but where
two sums are as near as that.

Rows are permuted at commit alone: KV caches and texts from the first generated
position to the last, whatever the buffers have room for. What a step weighs,
how beams end and how they are ranked is transformers' (beam_step.py).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import decode, sampling, step
from specdec.beam_step import NEVER, Search, take
from specdec.beam_traversal import (
  BeamState,
  Finished,
  Traversal,
  result_of,
  rows_of,
  traverse,
)
from specdec.inputs import Inputs, checked
from specdec.types import (
  SIBLINGS,
  AcceptanceRule,
  Array,
  DecodeState,
  Draft,
  Drafter,
  KVCache,
  Model,
  ModelOutput,
  Params,
  PyTree,
  Source,
)

STOPPING = (False, True, "never")
# It draws nothing, and any draft will do.
RULE = AcceptanceRule(
  None, None, "coupled", frozenset(SIBLINGS), lossless=True, name="beam search"
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
  spec = drafter.spec

  def finish(state, draft, output, beams):
    draft = spec.with_tree(draft)
    num_nodes = draft.tokens.shape[1]
    depth = min(spec.max_depth, num_nodes - 1)
    traversal = traverse(
      search, draft, output.logits, beams.replace(state=state), eos_ids, depth
    )
    state, finished = _move_texts(state, beams, traversal)
    if search.width > 1:
      rows = rows_of(traversal.beam).reshape(-1)
      first = beams.begin.min() - 1  # beams share their prompt's KV
      state = _move_rows(spec.name, state, rows, first, num_nodes)
      draft, output = _move_nodes(draft, output, rows)
    state = step.commit_step(
      *(target, drafter, RULE, params, state, draft, output),
      *result_of(traversal, draft),
    )
    return state, beams.replace(scores=traversal.scores, finished=finished)

  state, beams = step.draft_and_verify(
    *(target, drafter, RULE, params, beams.state),
    finish,
    beams.replace(state=None),
  )
  return beams.replace(state=state)


def _move_texts(
  state: DecodeState, beams: BeamState, traversal: Traversal
) -> tuple[DecodeState, Finished]:
  """Copies texts to where their beams now are, and those that are finished.

  Returns:
    The state of B w rows with texts of before the round in their new places,
    and the finished beams, with what they got in this round.
  """
  ranking, shape = traversal.ranking, traversal.beam.shape
  rows = rows_of(traversal.beam).reshape(-1)

  def keep(finished, tokens):
    both = [finished, tokens.reshape(*shape, -1)]  # [B, 2w, slots]
    return take(jnp.concatenate(both, axis=1), ranking.beam)

  def move(parts):
    return jax.tree.map(lambda x: x[rows], parts)

  length, first = state.length.reshape(shape), beams.begin.min()
  finished, used = kv.in_blocks(
    keep, beams.finished.tokens, -1, first, length.max(), state.tokens
  )
  # Draft log-probabilities are none of a beam's, in any row.
  texts = state.tokens, state.log_probs, state.origin
  texts, _ = kv.in_blocks(move, texts, -1, first, used)
  tokens, log_probs, origin = texts
  new = jnp.where(ranking.beam >= shape[1], ranking.length - length[:, :1], 0)
  finished, new_tokens, length, new = (
    x.reshape(-1, *x.shape[2:]) for x in (finished, ranking.tokens, length, new)
  )
  finished = step.append(finished, new_tokens, length, new)
  return (
    state.replace(tokens=tokens, log_probs=log_probs, origin=origin),
    Finished(
      finished.reshape(*shape, -1), ranking.length, ranking.scores, ranking.done
    ),
  )


def _move_rows(
  name: str, state: DecodeState, rows: Array, first: Array, num_nodes: int
) -> DecodeState:
  """Moves what row rows[r] has in caches and drafter's state to row r.

  Noise and counts belong to a place, and beams of one prompt share their source
  and all that limits them.

  Args:
    name: the drafter's.
    rows: [B w].
    first: [] cache slots before it are the same in all beams of a prompt.
    num_nodes: verified and not yet committed.

  Raises:
    ValueError: a part of the drafter's state does not have its rows first.
  """
  used, size = state.length.max(), state.tokens.shape[1]

  def move(path, x: PyTree) -> PyTree:
    if isinstance(x, KVCache):
      # It has room for a text of `size` and for its scratch after that.
      room = x.num_slots - size if x.layers else 0
      return kv.permute(x, rows, first, used + room)
    if x.shape[:1] != rows.shape:
      raise ValueError(
        f"the state of {name}{jax.tree_util.keystr(path)} has the shape "
        f"{x.shape}; its first axis must be the {len(rows)} rows of the batch"
      )
    return x[rows]

  cache = state.target_cache
  return state.replace(
    target_cache=kv.permute(cache, rows, first, used - 1 + num_nodes),
    draft_state=jax.tree_util.tree_map_with_path(
      move, state.draft_state, is_leaf=lambda x: isinstance(x, KVCache)
    ),
  )


def _move_nodes(
  draft: Draft, output: ModelOutput, rows: Array
) -> tuple[Draft, ModelOutput]:
  """Moves the verified nodes of row rows[r], and what follows them, to row r.

  Args:
    draft: [B w, N]; one tree of all rows, parents [N], stays as it is.
    output: [B w, N, ...].
    rows: [B w].
  """
  shared, parents = draft._replace(parents=None, resume=None), draft.parents
  moved, output = jax.tree.map(lambda x: x[rows], (shared, output))
  if parents.ndim == 2:
    parents = parents[rows]
  return moved._replace(parents=parents), output


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
  scores = jnp.zeros((batch, width)).at[:, 1:].set(NEVER)
  shape = batch, width
  finished = Finished(
    state.tokens.reshape(*shape, max_length),
    jnp.zeros(shape, jnp.int32),
    jnp.full(shape, NEVER, jnp.float32),
    jnp.zeros(shape, bool),
  )
  begin = inputs.prompt_length.astype(jnp.int32)
  return BeamState(state, scores, finished, begin)


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
  # 1 equals True, and both would share one compiled program.
  if type(search.early_stopping) is not bool and (
    search.early_stopping != "never"
  ):
    raise ValueError(
      f"early_stopping = {search.early_stopping!r}; accepted: "
      f"{', '.join(map(repr, STOPPING))}"
    )
  if not math.isfinite(search.length_penalty):
    raise ValueError(
      f"length_penalty = {search.length_penalty}; it must be finite"
    )
  most = search.num_weighed(len(eos_ids))
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
