"""Runs a head over whole texts at once, every position the root of a draft.

Training-time test (EAGLE-3, arXiv:2503.01840): level 0 reads the target's
hidden states; level j reads those of level j - 1, one position to the left, so
that the head is trained on its own hidden states as decoding feeds them.
The tokens are the text's. What level j sees at position i is what decoding
would: committed positions up to the root, i - j, and its own path behind it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec.drafters.heads.draft_head import (
  DraftHead,
  TargetWeights,
  View,
  view_of,
)
from specdec.types import Array, ModelOutput, PyTree


class Growing:
  """Stands in for a placement in training: KV grow by concatenation.

  A cache written in place would be copied by every gradient.
  """

  def __call__(self, x: Array, *names: str | None) -> Array:
    del names
    return x

  def on_each(self, write, arguments, result):
    del write, arguments, result
    return lambda buffer, new, slot: jnp.concatenate([buffer, new], axis=2)


growing = Growing()


def unroll(
  draft_head: DraftHead,
  weights: PyTree,
  target_weights: TargetWeights,
  tokens: Array,
  output: ModelOutput,
  levels: int,
) -> tuple[list[Array], list[Array]]:
  """Returns logits and hidden states of every level.

  Args:
    draft_head: constructed with `growing` for a placement.
    tokens: [B, T].
    output: of the target on them; features as in draft_head.features.
    levels: how many, the first one included.

  Returns:
    levels logits [B, T, n] and hidden states [B, T, W]: what level j drafts
    after tokens[:, i] when the round began j tokens before. Where i < j there
    was no such round, and they mean nothing.
  """
  batch, size = tokens.shape
  given = _shifted(draft_head.encode(weights, output))
  exit_hidden = output.features[0] if draft_head.head_config.exits else None
  layers, logits, hidden = (), [], []

  def rows(x):
    """A head that resets each round has a row for every position."""
    return (
      x.reshape(batch * size, 1, -1)
      if draft_head.head_config.resets_each_round
      else x
    )

  def back(x):
    return x.reshape(batch, size, -1)

  for level in range(levels):
    if draft_head.head_config.resets_each_round:
      view = _fresh(batch * size, level)
      # A path's KV come along to where its next token stands.
      layers = jax.tree.map(
        lambda x: _shifted(back(x)).reshape(x.shape), layers
      )
      line = tokens.reshape(batch * size, 1)
    else:
      view, line = _view(batch, size, level), tokens
    stepped, layers = draft_head.step(
      weights,
      target_weights,
      line,
      rows(given),
      layers,
      view,
      level,
      exit_hidden,
    )
    stepped = back(stepped)
    logits.append(draft_head.logits(weights, target_weights, stepped, level))
    hidden.append(stepped)
    given = _shifted(stepped)
  return logits, hidden


def _shifted(x: Array) -> Array:
  """What stands at i comes to i + 1; nothing to 0."""
  return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _view(batch: int, size: int, level: int) -> View:
  """Of level `level`, its KV behind those of the levels before."""
  at = np.arange(size)
  parts = [at[None, :] <= at[:, None] - level]  # committed, up to the root
  for m in range(1, level + 1):  # the path: level m stood level - m before
    parts.append(at[None, :] == at[:, None] - (level - m))
  mask = np.concatenate(parts, axis=1)
  mask[:level, -1] = True  # no such round: lest nothing be seen

  def rows(x):
    return jnp.broadcast_to(jnp.asarray(x)[None], (batch, *x.shape))

  return View(jnp.zeros((batch,), jnp.int32), rows(at), rows(mask))


def _fresh(rows: int, level: int) -> View:
  """The same where the cache began anew: the start and the path are seen."""
  return view_of(
    jnp.zeros((rows,), jnp.int32),
    None,
    level and level + 1,
    1 if level else 2,
    level + 2,
  )


def valid(size: int, level: int) -> Array:
  """[T] bool: positions at which a round may stand at this level."""
  return jax.lax.iota(jnp.int32, size) >= level
