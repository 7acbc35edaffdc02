"""A step of beam search: what it weighs, what goes on, what is finished.

Scores, finished beams and stopping are those of transformers' `generate` with
`num_beams`: a step weighs (1 + E) w continuations for E end tokens (two for
each beam at least), one that ends is finished if it is among the best w, and
the sum of log-probabilities over length ** length_penalty ranks these.

Letters in shape comments: B prompts, w beams of each, K continuations that a
step weighs, E end tokens, D depth of a draft, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec.types import Array

NEVER = -1e9  # the score of what is no beam, as in transformers
_BLOCK = 128  # continuations


class Search(NamedTuple):
  """What is searched for; hashable.

  Attributes:
    width: w, beams of a prompt. One is greedy decoding, which ends at its first
      end token whatever `early_stopping` says.
    length_penalty: exponent of the length, prompt excluded, by which a finished
      beam's score is divided.
    early_stopping: True: a prompt ends when w beams are finished; False: when
      no running beam would be better if it ended now; 'never': when none could
      become better.
  """

  width: int
  length_penalty: float = 1.0
  early_stopping: bool | str = False

  def num_weighed(self, num_eos: int) -> int:
    """K of a search with so many end tokens, as in transformers."""
    return max(2, 1 + num_eos) * self.width


class Continuations(NamedTuple):
  """The best beams of one token more, best first."""

  scores: Array  # [B, K]
  beam: Array  # [B, K] which of the w running ones goes on
  token: Array  # [B, K]
  log_prob: Array  # [B, K]
  ends: Array  # [B, K] bool

  def take(self, index: Array) -> "Continuations":
    """Returns those of index [B, m]."""
    return jax.tree.map(lambda x: take(x, index), self)


class Ranking(NamedTuple):
  """The best finished beams of each prompt in the midst of a round."""

  beam: Array  # [B, w] i: finished beam i of before the round; w + i: the
  #              running beam i of before the round, and `tokens`
  tokens: Array  # [B, w, D+1]
  length: Array  # [B, w], as Finished
  scores: Array  # [B, w]
  done: Array  # [B, w] bool


def continuations(
  log_probs: Array, scores: Array, count: int, eos_ids: Array, last: Array
) -> Continuations:
  """Returns the best continuations of all beams of a prompt.

  Args:
    log_probs: [B, w, V] of what follows each beam.
    scores: [B, w] of the beams.
    count: K.
    eos_ids: [E].
    last: [B] bool: every continuation ends, whatever it is.
  """
  batch, _, vocab_size = log_probs.shape
  total = (scores[..., None] + log_probs).reshape(batch, -1)
  best, index = largest(total, count)
  beam, token = index // vocab_size, index % vocab_size
  ends = (
    jnp.any(token[..., None] == eos_ids[None, None], axis=-1) | last[:, None]
  )
  log_prob = jnp.take_along_axis(log_probs.reshape(batch, -1), index, axis=1)
  return Continuations(best, beam, token, log_prob, ends)


def going_on(weighed: Continuations, width: int) -> Continuations:
  """Returns the w best that go on, [B, w].

  A step weighs enough for w of them; or all end, at the limit, and they are
  the w best of those.
  """
  order = weighed.scores + jnp.where(weighed.ends, jnp.float32(NEVER), 0)
  return weighed.take(jax.lax.top_k(order, width)[1])


def ranked(ranking: Ranking, new: Ranking) -> Ranking:
  """Returns the best of both, of which `new` may hold some that do not end."""
  new = new._replace(scores=jnp.where(new.done, new.scores, NEVER))
  both = jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), ranking, new)
  _, order = jax.lax.top_k(both.scores, ranking.scores.shape[1])
  return jax.tree.map(lambda x: take(x, order), both)


def penalised(scores: Array, output: Array, search: Search) -> Array:
  """Returns sums of log-probabilities over length ** length_penalty.

  Args:
    scores: [B, m].
    output: [B] tokens that the beams have, prompt excluded.
  """
  length = output.astype(jnp.float32)[:, None]
  return scores / length**search.length_penalty


def is_done(
  search: Search,
  ranking: Ranking,
  running: Continuations,
  output: Array,
  most: Array,
) -> Array:
  """[B] bool: whether no running beam is to get into the ranking.

  Args:
    running: [B, w], best first.
    output: [B] tokens that these have, prompt excluded.
    most: [B] tokens that they can get.
  """
  ahead = output
  if search.early_stopping == "never" and search.length_penalty > 0:
    ahead = most
  hope = penalised(running.scores[:, :1], ahead, search)
  done = jnp.all(hope <= ranking.scores[:, -1:], axis=1)
  if search.early_stopping is True or search.width == 1:
    done |= jnp.all(ranking.done, axis=1)
  return done


def take(x: Array, index: Array) -> Array:
  """Returns x[b, index[b, i]] for x [B, n, ...] and index [B, m]."""
  return jax.vmap(lambda x, i: x[i])(x, index)


def largest(x: Array, count: int) -> tuple[Array, Array]:
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
  values, index = jax.lax.top_k(take(x, chosen).reshape(batch, -1), count)
  block = jnp.take_along_axis(chosen, index // _BLOCK, axis=1)
  return values, block * _BLOCK + index % _BLOCK
