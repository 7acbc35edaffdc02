"""A language model that is a table: exact distributions for exact tests.

The distribution of a token depends on the two before it. The model reads the
older ones from its cache, through the very mask that a transformer uses, so a
wrong commit, position or mask changes its distribution as it would change a
transformer's.
"""

import jax
import jax.numpy as jnp

from specdec import cache as kv
from specdec.models import attention
from specdec.types import KVCache, Model, ModelOutput
from specdec.utils.constructors import cached


def init_params(
  key: jax.Array, vocab_size: int, scale: float = 1.0
) -> dict[str, jax.Array]:
  """Random logits [V + 1, V, V]: index V of the first axis is "no token"."""
  shape = (vocab_size + 1, vocab_size, vocab_size)
  return {"table": scale * jax.random.normal(key, shape, jnp.float32)}


@cached
def model(vocab_size: int) -> Model:
  """A second-order Markov model; hidden states are its logits (M = V), and so
  is the one stream that it has to read, 1."""

  def init_cache(batch: int, slots: int) -> KVCache:
    return kv.init(batch, slots, 1, 1, 1, jnp.float32)

  def apply(
    params,
    tokens,
    cache,
    *,
    parents=None,
    first=0,
    start=0,
    stop=None,
    hidden=None,
    head=True,
    features=(),
  ):
    del hidden
    if start or stop not in (None, 1) or {*features} - {1}:
      raise ValueError("the table model has one layer and the stream behind it")
    num_tokens = tokens.shape[1]
    view = attention.view(cache.length, parents, first, num_tokens)
    slot, where = view.slot, view.positions  # [B], [B, T]
    written = tokens[:, None, :, None].astype(jnp.float32)
    keys = kv.write(cache.layers[0][0], written, slot)
    values = where[:, None, :, None].astype(jnp.float32)
    values = kv.write(cache.layers[0][1], values, slot)
    mask = view.mask_of(jnp.arange(cache.num_slots))
    above = values[:, 0, None, :, 0] == where[:, :, None] - 1
    above &= mask  # [B, T, S]: the slot just above each node
    previous = jnp.sum(jnp.where(above, keys[:, 0, None, :, 0], 0.0), -1)
    previous = previous.astype(jnp.int32)
    previous = jnp.where(jnp.any(above, -1), previous, vocab_size)
    logits = params["table"][previous, tokens]
    streams = (logits,) * len(features)
    output = ModelOutput(logits if head else None, logits, streams)
    return output, cache.replace(layers=((keys, values),))

  return Model(apply, init_cache, vocab_size, 1)
