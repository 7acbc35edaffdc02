"""Random numbers that have an address.

Every key is folded from (row key, address), never from the order of calls
(rule 4): coupled noise from (row, absolute position), all other noise from
(row, committed length at the start of the round, stream, node), so that no two
uncoupled draws of a generation ever share noise.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

# Streams never share noise: a draft's noise reused for the next token biases
# the text (vLLM #47386).
COUPLED, DRAFT, ACCEPT, NEXT = range(4)


def _threefry(key: jax.Array) -> jax.Array:
  """Derives a threefry key from a key of any implementation.

  Takes typed keys (`jax.random.key`) and old ones (`jax.random.PRNGKey`). Other
  implementations draw a whole vmapped batch from its first key ('rbg'), so that
  a row's noise would depend on its neighbours.
  """
  typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
  if typed and jnp.ndim(key) == 0:
    key = jax.random.key_data(key)
  words = jnp.ndim(key) == 1 and jnp.result_type(key) == jnp.uint32
  if not words or jnp.size(key) < 2:
    raise ValueError("key is not one JAX random key; take jax.random.key(seed)")
  derived = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
  for word in key[2:]:
    derived = jax.random.fold_in(derived, word)
  return derived


def row_keys(key: jax.Array, index: jax.Array) -> jax.Array:
  """[B] keys, from the prompts' indices [B] and not their slots in a batch."""
  key = _threefry(key)
  return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def pilot_key(key: jax.Array) -> jax.Array:
  """Derives the key of runs that decide how others decode (`--k=auto`).

  A decision that had seen the noise that then writes the text would bias it
  (rule 7). No row has this index: indices are non-negative int32.
  """
  return jax.random.fold_in(_threefry(key), jnp.uint32(2**32 - 1))


def fold(keys: jax.Array, *address: jax.Array | int) -> jax.Array:
  """[B] keys for one address; each part is a number or [B] numbers."""
  for part in address:
    part = jnp.broadcast_to(jnp.asarray(part, jnp.int32), keys.shape)
    keys = jax.vmap(jax.random.fold_in)(keys, part)
  return keys


@dataclasses.dataclass(frozen=True)
class Noise:
  """All noise of one round."""

  keys: jax.Array  # [B]
  length: jax.Array  # [B] committed tokens at the start of the round
  vocab_size: int
  coupled: bool  # drafter and target share one vector a position
  wanted: jax.Array | bool = True  # False: every row is greedy, draw nothing

  def _gumbel(self, *address) -> jax.Array:
    keys = fold(self.keys, *address)
    shape = (self.keys.shape[0], self.vocab_size)

    def one_row(key):
      return jax.random.gumbel(key, shape[1:])

    def draw(keys):
      # A CPU runs threefry's rounds as a loop over the whole array: by rows it
      # stays in the cache, up to four times as fast.
      return jax.lax.platform_dependent(
        keys, cpu=lambda x: jax.lax.map(one_row, x), default=jax.vmap(one_row)
      )

    return jax.lax.cond(self.wanted, draw, lambda _: jnp.zeros(shape), keys)

  def at_position(self, position: jax.Array) -> jax.Array:
    """[B, V] Gumbel noise that decides the token at position [B]."""
    return self._gumbel(COUPLED, position)

  def draft(self, depth, node) -> jax.Array:
    """[B, V] Gumbel noise to draw node `node` at depth `depth`, scalars."""
    chex.assert_rank([depth, node], 0)
    if self.coupled:
      return self.at_position(self.length - 1 + depth)
    return self._gumbel(DRAFT, self.length, node)

  def accept(self, num_nodes: int) -> jax.Array:
    """[B, N] uniforms in [0, 1), one a node."""
    columns = [
      jax.vmap(jax.random.uniform)(fold(self.keys, ACCEPT, self.length, node))
      for node in range(num_nodes)
    ]
    return jnp.stack(columns, axis=1)

  def next(self, node: jax.Array) -> jax.Array:
    """[B, V] Gumbel noise for the token after the last kept node [B]."""
    return self._gumbel(NEXT, self.length, node)
