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

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec import decode, sampling, step
from specdec.beam_traversal import (
  NEVER,
  BeamState,
  Finished,
  Search,
  result_of,
  traverse,
)
from specdec.inputs import Inputs, checked
from specdec.types import (
  SIBLINGS,
  AcceptanceRule,
  Array,
  DecodeState,
  Drafter,
  Model,
  Params,
  PyTree,
  Source,
)

STOPPING = (False, True, "never")
# It draws nothing, and any draft will do.
RULE = AcceptanceRule(
  None, None, "coupled", frozenset(SIBLINGS), lossless=True, name="beam search"
)


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
  spec = drafter.spec
  draft, state = step.draft_step(target, drafter, RULE, params, beams.state)
  beams = beams.replace(state=state)

  def finish(width: int, beams: BeamState) -> BeamState:
    part = spec.with_tree(step.first_nodes(draft, width))
    state = beams.state
    output, state = step.verify_step(target, spec, params.target, state, part)
    depth = min(spec.max_depth, width - 1)
    traversal = traverse(search, part, output.logits, beams, eos_ids, depth)
    if search.width > 1:
      rows = (
        jnp.arange(len(traversal.steps))[:, None] * search.width + traversal.row
      )
      rows = rows.reshape(-1)
      state = _permuted(state, rows, width)
      moved = (part._replace(resume=None), output)
      part, output = jax.tree.map(
        lambda x: x[rows] if isinstance(x, jax.Array) else x, moved
      )
    state = step.commit_step(
      target,
      drafter,
      RULE,
      params,
      state,
      part,
      output,
      *result_of(traversal, part),
    )
    return beams.replace(
      state=state,
      scores=traversal.scores,
      finished=traversal.finished,
      improvable=traversal.improvable,
    )

  return step.at_width(spec, draft, beams.state.done, finish, beams)


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
    jnp.zeros((*shape, max_length), jnp.int32),
    jnp.zeros(shape, jnp.int32),
    jnp.full(shape, NEVER, jnp.float32),
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
