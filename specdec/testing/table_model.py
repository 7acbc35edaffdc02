"""A language model that is a table: exact distributions for exact tests.

The distribution of a token depends on the two before it. The model reads the
older ones from its cache, through the very mask that a transformer uses, so a
wrong commit, position or mask changes its distribution as it would change a
transformer's.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec.models import attention
from specdec.types import KVCache, Model, ModelOutput, Params
from specdec.utils.constructors import cached


def init_params(
  key: jax.Array, vocab_size: int, scale: float = 1.0
) -> dict[str, jax.Array]:
  """Random logits [V + 1, V, V]: index V of the first axis is "no token"."""
  shape = (vocab_size + 1, vocab_size, vocab_size)
  return {"table": scale * jax.random.normal(key, shape, jnp.float32)}


def agreement(target: np.ndarray, draft: np.ndarray) -> float:
  """Returns how often rejection sampling accepts a draft token, over a text.

  Args:
    target, draft: [V, V, V] probabilities. The mean of sum min(p, q) is over
      the pairs of tokens that the target's endless text has, begun anywhere.
  """
  size = len(target)
  pairs = np.full((size, size), 1 / size**2)
  for _ in range(64):
    # Half of the mass stays, so that no cycle keeps it from settling.
    pairs = (pairs + np.einsum("ab,abc->bc", pairs, target)) / 2
  return float(np.sum(pairs * np.minimum(target, draft).sum(axis=-1)))


def agreeing_params(
  seed: int, vocab_size: int, agreements: Sequence[float]
) -> Params:
  """Returns random tables of a target and a draft that agree so often.

  The vocabulary falls into as many regions as there are agreements, of equal
  size and in their order; a text stays in the region of its first token, and
  there draft tokens are accepted as often as is said. Some states are certain
  and others are not, and the draft is as certain as the target, of partly
  something else: its logits are a mean of the target's and of unrelated ones.

  Raises:
    ValueError: the regions cannot be of equal size, or even unrelated tables
      agree more.
  """
  regions = len(agreements)
  size = vocab_size // regions
  if size * regions != vocab_size:
    raise ValueError(f"{vocab_size} tokens do not make {regions} equal regions")
  rng = np.random.default_rng(seed)
  tables = np.full((2, vocab_size + 1, vocab_size, vocab_size), -np.inf)
  for number, wanted in enumerate(agreements):
    within = slice(number * size, (number + 1) * size)
    certain = rng.uniform(1, 8, (1, vocab_size + 1, size, 1))
    shape = (2, vocab_size + 1, size, size)
    logits, unrelated = certain * rng.standard_normal(shape)
    mixed = _mixed(logits, unrelated, within, wanted)
    tables[:, :, within, within] = logits, mixed
  target, draft = (jnp.asarray(x, jnp.float32) for x in tables)
  return Params({"table": target}, {"table": draft})


def _mixed(
  logits: np.ndarray, unrelated: np.ndarray, within: slice, wanted: float
) -> np.ndarray:
  """Returns the mean of two tables that agrees with the first as is wanted."""
  low, high = 0.0, 1.0
  target = _softmax(logits[within])

  def agreed(share: float) -> float:
    mixed = logits + share * (unrelated - logits)
    return agreement(target, _softmax(mixed[within]))

  if agreed(high) > wanted:
    raise ValueError(f"unrelated tables agree more often than {wanted}")
  for _ in range(30):
    middle = (low + high) / 2
    low, high = (middle, high) if agreed(middle) > wanted else (low, middle)
  return logits + low * (unrelated - logits)


def _softmax(logits: np.ndarray) -> np.ndarray:
  powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return powers / powers.sum(axis=-1, keepdims=True)


@cached
def model(vocab_size: int) -> Model:
  """A second-order Markov model; hidden states are its logits (M = V), and so
  is the one stream that it has to read, 1."""

  def init_cache(batch: int, slots: int) -> KVCache:
    return kv.init(batch, slots, 1, 1, (1, 1), jnp.float32)

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
