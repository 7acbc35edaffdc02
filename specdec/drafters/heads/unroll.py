"""Runs a head over whole texts at once, every position the root of a draft.

Training-time test (EAGLE-3, arXiv:2503.01840): level 0 reads the target's
hidden states; level j reads those of level j - 1, one position to the left, so
that the head is trained on its own hidden states as decoding feeds them.
The tokens are the text's. What level j sees at position i is what decoding
would: committed positions up to the root, i - j, and its own path after it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specdec import sharding
from specdec.drafters.heads.draft_head import (
  DraftHead,
  TargetWeights,
  View,
)
from specdec.drafters.mask_slots import Slots
from specdec.models import attention
from specdec.models.transformer import Place
from specdec.types import Array, ModelOutput, PyTree


@dataclasses.dataclass(frozen=True)
class Growing:
  """Stands in for a placement in training: KV grow by concatenation.

  A cache written in place would be copied by every gradient.

  Attributes:
    place: of activations, on a mesh.
  """

  place: Place = sharding.anywhere

  def __call__(self, x: Array, *names: str | None) -> Array:
    return self.place(x, *names)

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
  resets = draft_head.head_config.resets_each_round
  given = _shifted(draft_head.encode(weights, output))
  exit_hidden = output.features[0] if draft_head.head_config.exits else None
  if resets:  # every position is a row
    tokens = tokens.reshape(batch * size, 1)
  layers, logits, hidden = (), [], []

  def whole(x):
    return x.reshape(batch, size, -1)

  for level in range(levels):
    if resets:
      view = _fresh(batch * size, level)
      # A path's KV come along to where its next token stands.
      layers = jax.tree.map(
        lambda x: _shifted(whole(x)).reshape(x.shape), layers
      )
    else:
      view = _view(batch, size, level, draft_head.start)
    stepped, layers = draft_head.step(
      weights,
      target_weights,
      tokens,
      given.reshape(*tokens.shape, -1),
      layers,
      view,
      level,
      exit_hidden,
    )
    stepped = whole(stepped)
    logits.append(draft_head.logits(weights, target_weights, stepped, level))
    hidden.append(stepped)
    given = _shifted(stepped)
  return logits, hidden


def unroll_slots(
  draft_head: DraftHead,
  weights: PyTree,
  target_weights: TargetWeights,
  tokens: Array,
  output: ModelOutput,
  slots: Slots,
) -> list[Array]:
  """Returns logits of every level of a parallel head, by one pass.

  Args:
    draft_head, weights, target_weights, tokens, output: as of `unroll`.
    slots: after the tokens.

  Returns:
    Of each level [B, n, tokens it can draft]: what its slots draft. Roots
    before `draft_head.start` mean nothing.
  """
  given = _shifted(draft_head.encode(weights, output))
  rest = slots.root.shape[1] - tokens.shape[1]
  stepped, _ = draft_head.step(
    weights,
    target_weights,
    slots.tokens(tokens, -1),
    jnp.pad(given, ((0, 0), (0, rest), (0, 0))),
    (),
    slots.view(draft_head.start),
    0,
    None,
  )
  logits = draft_head.logits(weights, target_weights, stepped, 0)
  return slots.by_level(logits)


def _shifted(x: Array) -> Array:
  """What stands at i comes to i + 1; nothing to 0."""
  return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _view(batch: int, size: int, level: int, start: int) -> View:
  """Of level `level`, its KV after those of the levels before.

  Args:
    start: position of the first token in the head's KV cache.
  """
  # Of iotas: as constants the masks of long texts would fill the program.
  at = jnp.arange(size)
  row, column = at[:, None], at[None, :]
  mask = (column <= row - level) & (column >= start)  # committed, to the root
  if not level:  # no such round: lest nothing be seen
    mask |= (row < start) & (column == size - 1)
  where, mask = (
    jnp.broadcast_to(x[None], (batch, *x.shape)) for x in (at, mask)
  )
  # The path: level m stood level - m before.
  lags = tuple(reversed(range(level)))
  none = jnp.zeros((batch,), jnp.int32)
  return View(none, 0, where, None, mask=mask, lags=lags)


def _fresh(rows: int, level: int) -> View:
  """The same where the cache began anew: the start and the path are seen."""
  first, count = (level + 1, 1) if level else (0, 2)
  start = jnp.zeros((rows,), jnp.int32)
  return attention.view(start, None, first, count).masked(level + 2)


def valid(draft_head: DraftHead, size: int, level: int) -> Array:
  """[T] bool: positions at which a round may stand at this level."""
  return jax.lax.iota(jnp.int32, size) >= level + draft_head.start
