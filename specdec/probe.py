"""What the rounds of a generation are worth by the laws alone.

In every round of a generation its draft is judged by other rules as well, none
of whose coins are thrown: what a rule would keep of the very same draft is
arithmetic, so rules are compared with little noise between them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import rounds, sampling, tree
from specdec.session import Session
from specdec.types import AcceptanceRule, Array, Draft, PyTree
from specdec.walk import WALKS

# (draft, target's law [B, N, V]) -> a pytree of [B, ...] numbers.
Probe = Callable[[Draft, Array], PyTree]


def over_rounds(
  session: Session, rows: Sequence[Sequence[int]], probe: Probe
) -> tuple[PyTree, np.ndarray]:
  """Sums of a probe over the rounds that write these texts, row by row.

  They are written by the session's own rule. A round counts while the row has
  room for the whole draft, so that the length limit never cuts what is counted.
  No token ends a text.

  Args:
    rows: token ids of prompts, as many as one likes.

  Returns:
    The sums, [rows, ...] each, and how many rounds were summed [rows].
  """
  run, found = _compiled(session, probe), []
  for first in range(0, len(rows), session.batch):
    part = rows[first : first + session.batch]
    numbers = range(first, first + len(part))
    done = run(session.params, session.start(part, numbers, plain=False))
    found.append([np.asarray(x)[: len(part)] for x in jax.tree.leaves(done)])
  whole = [np.concatenate(parts) for parts in zip(*found)]
  return jax.tree.unflatten(jax.tree.structure(done), whole)


def _compiled(session: Session, probe: Probe):
  """The loop, compiled once for a session and a probe."""
  spec, target, rule = session.drafter.spec, session.target, session.rule

  def look(params, state):
    draft, state = rounds.draft_step(
      session.drafter, params, state, target.vocab_size, rule
    )
    if spec.chain:
      draft = draft._replace(parents=tree.chain(spec.max_nodes))
    output, _ = rounds.verify_step(target, params.target, state, draft, spec)
    return probe(draft, sampling.warp(output.logits, state.sampling))

  def step(carry):
    params, state, sums, counted = carry
    room = (state.limit - state.length >= spec.max_depth) & ~state.done
    seen = look(params, state)
    sums = jax.tree.map(
      lambda total, new: total + jnp.where(_spread(room, new), new, 0.0),
      sums,
      seen,
    )
    state = rounds.decode_step(
      target, session.drafter, rule, params, state, jnp.zeros((0,), jnp.int32)
    )
    return params, state, sums, counted + room

  @jax.jit
  def run(params, state):
    shapes = jax.eval_shape(look, params, state)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = jnp.zeros_like(state.length)
    done = jax.lax.while_loop(
      lambda carry: ~jnp.all(carry[1].done), step, (params, state, sums, zero)
    )
    return done[2], done[3]

  return run


def _spread(mask: Array, like: Array) -> Array:
  return mask.reshape(mask.shape + (1,) * (like.ndim - 1))


class Lengths(NamedTuple):
  """What some rules would keep of the drafts of a generation, row by row."""

  expected: list[np.ndarray]  # of each rule [rows]: sums of expected lengths
  rounds: np.ndarray  # [rows]


def expected_lengths(
  session: Session,
  rows: Sequence[Sequence[int]],
  rules: Sequence[AcceptanceRule],
) -> Lengths:
  """Expected accepted tokens a round, of one generation's drafts by each rule.

  nan where a rule does not know (`acceptance.coupled` for drawn siblings).
  """
  depth = session.drafter.spec.max_depth

  def probe(draft: Draft, law: Array) -> list[Array]:
    known = isinstance(draft.parents, np.ndarray)

    def keep(rule, tokens, parents, log_probs, count, law):
      shape = draft.parents if known else parents
      return rule.keep(Draft(tokens, shape, log_probs, count), law)

    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    found = []
    for rule in rules:
      kept = jax.vmap(lambda *row, rule=rule: keep(rule, *row))(
        draft.tokens, parents, draft.log_probs, draft.count, law
      )
      survival = WALKS[rule.walk].survival(draft, kept, depth)
      found.append(jnp.sum(survival, axis=-1))
    return found

  return Lengths(*over_rounds(session, rows, probe))


def acceptance_by_rank(
  session: Session, rows: Sequence[Sequence[int]]
) -> np.ndarray:
  """[R] how often a node's r-th child is the one that is kept.

  Args:
    session: its drafter drafts R siblings below the pending token that are
      not i.i.d., its rule walks to the first that is kept.
  """

  def probe(draft: Draft, law: Array) -> Array:
    keep = jax.vmap(
      lambda tokens, log_probs, count, law: session.rule.keep(
        Draft(tokens, draft.parents, log_probs, count), law
      )
    )(draft.tokens, draft.log_probs, draft.count, law)[:, 1:]
    refused = jnp.cumprod(1.0 - keep, axis=1)
    before = jnp.concatenate([jnp.ones_like(keep[:, :1]), refused[:, :-1]], 1)
    return keep * before

  found, counted = over_rounds(session, rows, probe)
  return found.sum(0) / counted.sum()
