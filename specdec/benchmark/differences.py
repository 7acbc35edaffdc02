"""Describes where a text leaves the baseline's, and how near to a tie."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import multihost, sampling
from specdec.benchmark.decoder import Decoder
from specdec.noise import Noise, row_keys
from specdec.types import Source


def first_difference(
  decoder: Decoder,
  prompt: Sequence[int],
  text: Sequence[int],
  baseline: Sequence[int],
  index: int,
) -> str:
  """Describes where a text leaves the baseline's, and how near to a tie."""
  both = list(zip(text, baseline))
  at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
  # As many equal rows as a mesh must have.
  rows = decoder.places.target.ways("rows") if decoder.places else 1
  given = [decoder.start_token] if decoder.has_encoder else prompt
  ids = np.asarray([[*given, *baseline[:at]]] * rows)
  position = jnp.asarray([ids.shape[1]])

  text = jnp.asarray([list(prompt)] * rows)

  @jax.jit
  def last(params, ids):
    source = Source(text, jnp.full((rows,), len(prompt)))
    slots = ids.shape[1] + 1
    cache = kv.empty(decoder.target, params, rows, slots, source)
    return decoder.target.apply(params, ids, cache)[0].logits[:1, -1]

  logits = jnp.asarray(multihost.whole(last(decoder.params.target, ids)))
  if decoder.temperature > 0:
    key = row_keys(decoder.key, jnp.asarray([index]))
    noise = Noise(key, position, decoder.target.vocab_size, coupled=True)
    logits = sampling.warp(logits, decoder.settings(1))
    logits += noise.at_position(position)
  second, best = np.sort(np.asarray(logits[0]))[-2:]
  return (
    f"prompt {index} leaves it at new token {at}, where the two likeliest "
    f"tokens are {best - second:.2g} apart"
  )
