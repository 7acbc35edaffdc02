"""Control flow for what holds a cache."""

from collections.abc import Callable
from typing import TypeVar

import jax

State = TypeVar("State")
Inputs = TypeVar("Inputs")


def when(
  condition: jax.Array,
  body: Callable[[State, Inputs], State],
  state: State,
  inputs: Inputs,
) -> State:
  """Returns body(state, inputs) if a scalar condition holds, else the state.

  It is a loop of at most one turn: a cache that went through `lax.cond` would
  be copied (rule 9).

  Args:
    inputs: what the body reads. To the compiler they are new in the turn: what
      does not change in a loop it computes ahead of it, wanted or not, and
      would compute the first products of a pass that is not run.
  """

  def turn(i, state):
    return body(state, jax.lax.optimization_barrier((i, inputs))[1])

  return jax.lax.fori_loop(0, condition.astype("int32"), turn, state)
