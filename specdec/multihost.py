"""Several processes as one: who writes, what all must agree on.

Invariant: with one process everything here is the identity.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
  """Whether this process is the one that prints and writes."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def put(x, where: jax.sharding.Sharding) -> jax.Array:
  """An array that every process has, onto their devices."""
  if where.is_fully_addressable:
    return jax.device_put(x, where)
  x = np.asarray(x)  # device_put would compare it among all of them
  return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def agree(values) -> np.ndarray:
  """The first process's numbers, on every process.

  What a host decides by its clock or its files, and all programs depend on,
  must pass through here, or processes wait for each other for ever.
  """
  if jax.process_count() == 1:
    return np.asarray(values)
  return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(values)))


def agree_text(text: str | None) -> str | None:
  """The first process's text, or None, on every process."""
  if jax.process_count() == 1:
    return text
  size = int(agree(-1 if text is None else len(text.encode())))
  if size < 0:
    return None
  content = np.zeros((size,), np.uint8)
  if is_first():
    content[:] = np.frombuffer(text.encode(), np.uint8)
  return agree(content).tobytes().decode()


def whole(x: jax.Array | np.ndarray) -> np.ndarray:
  """All of an array, also where other processes hold parts of it."""
  if not isinstance(x, jax.Array):
    return np.asarray(x)
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)
