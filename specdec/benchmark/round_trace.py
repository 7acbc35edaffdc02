"""Records what every round drafted and what became of it, for people to see."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import step
from specdec.benchmark.decoder import Decoder
from specdec.decode import in_32_bits
from specdec.traversal import drafted, parents_of
from specdec.types import DecodeState, Draft


class Round(NamedTuple):
  """The draft of one row in one round: n nodes, node 0 the pending token."""

  tokens: np.ndarray  # [n]
  parents: np.ndarray  # [n], -1 of node 0
  draft_log_probs: np.ndarray  # [n] in the distribution that it was drawn from
  log_probs: np.ndarray  # [n] of the target, at temperature 1, unfiltered
  path: Sequence[int]  # accepted nodes whose tokens the round committed
  cut: Sequence[int] = ()  # and those after the end of the text


class Tracer:
  """Runs rounds one by one and keeps them; for `Decoder.decode(run=)`.

  Every round runs all of the draft's nodes, so it is slower than the loop, and
  its text is the same but for the rounding of sums.

  Attributes:
    rounds: of every row of the decoder's batch, those so far.
  """

  def __init__(self, decoder: Decoder):
    if decoder.places:
      raise ValueError("rounds are recorded on one device; leave the mesh out")
    self.rounds: list[list[Round]] = [[] for _ in range(decoder.batch)]
    self._decoder = decoder
    self._eos = jnp.asarray(np.asarray(decoder.eos_ids, np.int32))

  def __call__(self, state: DecodeState, max_rounds: int = 1) -> DecodeState:
    """Runs one round, however many are asked for."""
    del max_rounds
    decoder, length = self._decoder, np.asarray(state.length)
    parts = decoder.target, decoder.drafter, decoder.rule
    idle = decoder.drafter.idle is not None and bool(_is_idle(*parts, state))
    state, *traced = _run(*parts, decoder.params, state, self._eos, alone=idle)
    *nodes, count, path, accepted = map(np.asarray, traced)
    committed = np.asarray(state.length) - length
    for row, rounds in enumerate(self.rounds):
      if size := committed[row]:
        kept = path[row, 1 : 1 + accepted[row]].tolist()
        fields = (x[row, : count[row]] for x in nodes)
        rounds.append(Round(*fields, kept[:size], kept[size:]))
    return state


_PARTS = ("target", "drafter", "rule")


@functools.partial(jax.jit, static_argnames=_PARTS)
@in_32_bits
def _is_idle(target, drafter, rule, state):
  return drafter.idle(step.context_of(state, target.vocab_size, rule))


@functools.partial(jax.jit, static_argnames=(*_PARTS, "alone"))
@in_32_bits
def _run(target, drafter, rule, params, state, eos_ids, alone):
  """One round; returns the state, `_of_nodes`, the path [B, D + 1], and how
  many of its nodes were accepted, those after the end of a text included."""
  spec = drafter.spec
  if alone:
    context = step.context_of(state, target.vocab_size, rule)
    draft = step.pending_only(context, spec)
  else:
    draft, state = step.draft_step(target, drafter, rule, params, state)
  output, state = step.verify_step(target, spec, params.target, state, draft)
  logits = output.logits
  outcome = step.accept_step(rule, spec, draft, logits, state, eos_ids)
  after = step.commit_step(
    target, drafter, rule, params, state, draft, output, *outcome
  )
  accepted, whole = outcome
  nodes = _of_nodes(spec.with_tree(draft), logits)
  return after, *nodes, accepted.path, whole.num_accepted


def _of_nodes(draft: Draft, logits: jax.Array) -> tuple[jax.Array, ...]:
  """Returns tokens, parents, draft and target log-probabilities [B, N] of a
  draft's nodes, and how many there are [B]."""
  parents = parents_of(draft)
  rows, nodes = jnp.ogrid[: parents.shape[0], : parents.shape[1]]
  before = jnp.maximum(parents, 0)
  target = jax.nn.log_softmax(logits)[rows, before, draft.tokens]
  if draft.log_probs is None:
    own = jnp.zeros_like(target)
  else:
    own = draft.log_probs[rows, nodes, draft.tokens]
  count = jnp.sum(drafted(draft), axis=-1)
  return draft.tokens, parents, own, target, count
