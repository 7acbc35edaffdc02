"""What the rounds of a generation are worth by the distributions alone.

In every round of a generation its draft is evaluated by other rules as well,
none of whose uniform draws are thrown: what a rule would keep of the very same
draft is arithmetic, so rules are compared with little noise between them.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_tree, sampling, step
from specdec.benchmark.batches import batches_of
from specdec.benchmark.decoder import Decoder
from specdec.traversal import TRAVERSALS, accept_probs
from specdec.types import AcceptanceRule, Array, Draft, PyTree

# (draft, target's distribution [B, N, V]) -> a pytree of [B, ...] numbers.
Statistic = Callable[[Draft, Array], PyTree]


def over_rounds(
  decoder: Decoder, rows: Sequence[Sequence[int]], statistic: Statistic
) -> tuple[PyTree, np.ndarray]:
  """Sums a statistic over the rounds that write these texts, row by row.

  They are written by the decoder's own rule. A round counts while the row has
  room for the whole draft, so that the length limit never cuts what is counted.
  No token ends a text.

  Returns:
    The sums, [rows, ...] each, and how many rounds were summed [rows].
  """
  spec, target, rule = decoder.drafter.spec, decoder.target, decoder.rule

  def evaluate(params, state):
    draft, state = step.draft_step(target, decoder.drafter, rule, params, state)
    output, _ = step.verify_step(target, spec, params.target, state, draft)
    return statistic(
      spec.with_tree(draft), sampling.warp(output.logits, state.sampling)
    )

  def body(carry):
    params, state, sums, counted = carry
    room = (state.limit - state.length >= spec.max_depth) & ~state.done
    where = jax.vmap(jnp.where, (0, 0, None))
    sums = jax.tree.map(
      lambda total, new: total + where(room, new, 0.0),
      sums,
      evaluate(params, state),
    )
    state = step.decode_step(
      target, decoder.drafter, rule, params, state, jnp.zeros((0,), jnp.int32)
    )
    return params, state, sums, counted + room

  @jax.jit
  def run(params, state):
    shapes = jax.eval_shape(evaluate, params, state)
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = jnp.zeros_like(state.length)
    done = jax.lax.while_loop(
      lambda carry: ~jnp.all(carry[1].done), body, (params, state, sums, zero)
    )
    return done[2:]

  parts = [
    run(decoder.params, decoder.start(batch))
    for batch in batches_of(rows, decoder.batch)
  ]
  return jax.tree.map(lambda *x: np.concatenate(x)[: len(rows)], *parts)


def expected_lengths(
  decoder: Decoder,
  rows: Sequence[Sequence[int]],
  rules: Sequence[AcceptanceRule],
) -> tuple[list[np.ndarray], np.ndarray]:
  """Computes expected accepted tokens of one generation's drafts by each rule,
  sums over rounds [rows], and the numbers of rounds [rows].

  nan where a rule does not know (`acceptance.coupled` for drawn siblings).
  """
  depth = decoder.drafter.spec.max_depth

  def statistic(draft: Draft, target_log_probs: Array) -> list[Array]:
    expected = []
    for rule in rules:
      accept_prob = accept_probs(rule, draft, target_log_probs)
      prefix_acceptance = TRAVERSALS[rule.traversal].prefix_acceptance(
        draft, accept_prob, depth
      )
      expected.append(jnp.sum(prefix_acceptance, axis=-1))
    return expected

  return over_rounds(decoder, rows, statistic)


def acceptance_by_depth(
  decoder: Decoder, rows: Sequence[Sequence[int]]
) -> np.ndarray:
  """Returns [D, R] how often the r-th child of a first child at depth d is the
  one that is kept, once all first children above it were.

  Args:
    decoder: its drafter drafts a comb (`catalog.SHAPES`) of siblings that are
      not i.i.d., its rule walks to the first that is kept.
  """
  parents = np.array(decoder.drafter.spec.parents)
  depth = draft_tree.depth(parents)[1:] - 1
  first = np.flatnonzero(np.diff(depth, prepend=-1))  # of each level
  rank = np.arange(len(depth)) - first[depth]
  place = depth, rank
  shape = len(first), 1 + rank.max()

  def statistic(draft: Draft, target_log_probs: Array) -> tuple[Array, Array]:
    accept_prob = accept_probs(decoder.rule, draft, target_log_probs)[:, 1:]
    accept_prob = (
      jnp.zeros((len(accept_prob), *shape)).at[:, *place].set(accept_prob)
    )
    refused = jnp.cumprod(1.0 - accept_prob[..., :-1], axis=-1)
    kept = accept_prob.at[..., 1:].multiply(refused)
    reached = jnp.cumprod(kept[..., :-1, 0], axis=-1)
    reached = jnp.pad(reached, ((0, 0), (1, 0)), constant_values=1.0)
    return kept * reached[..., None], reached

  (kept, reached), _ = over_rounds(decoder, rows, statistic)
  return kept.sum(0) / np.maximum(reached.sum(0), 1e-9)[:, None]
