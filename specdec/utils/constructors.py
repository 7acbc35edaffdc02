"""Constructors of drafters, rules, shapes and models, cached by arguments.

`jax.jit` takes these as static arguments and compares them by the identity of
their functions. So equal arguments must give one object, or a caller's loop
that constructs a drafter at every turn compiles at every turn.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

_Constructor = TypeVar("_Constructor", bound=Callable)


@dataclasses.dataclass(frozen=True)
class _Call:
  """Arguments of a call, equal where their key is."""

  key: tuple
  bound: inspect.BoundArguments = dataclasses.field(compare=False)


def cached(constructor: _Constructor) -> _Constructor:
  """Returns the constructor with its latest results cached.

  Arguments are compared by value: by position or by name, left out or the
  default; sequences and arrays by what they hold.
  """
  signature = inspect.signature(constructor)

  @functools.lru_cache(maxsize=1024)
  def construct(call: _Call):
    return constructor(*call.bound.args, **call.bound.kwargs)

  @functools.wraps(constructor)
  def wrapped(*args, **options):
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    return construct(_Call(_key(tuple(bound.arguments.values())), bound))

  return wrapped


def _key(x: Any):
  """A hashable value, equal for equal arguments."""
  if isinstance(x, (np.ndarray, jax.Array)):
    x = np.asarray(x)
    return x.dtype.str, x.shape, x.tobytes()
  if isinstance(x, (tuple, list)):
    kind = tuple if isinstance(x, list) else type(x)
    return kind, *map(_key, x)
  if isinstance(x, (bool, int, float)):
    return type(x), x  # 1, 1.0 and True are equal
  return x
