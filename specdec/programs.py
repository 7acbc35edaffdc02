"""The two programs of a generation on a mesh: prefill, and the loop.

`jax.jit` with `in_shardings` and `out_shardings` is what `pjit` became. What
decode compiles for one device is compiled here with a sharding for every leaf
that goes in or comes out; the loop's state is donated. Invariant: nothing in
models, drafters or rules knows of it but the placement that a model was made
with.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from specdec import decode, sharding
from specdec.types import (
  AcceptanceRule,
  Array,
  DecodeState,
  Drafter,
  Model,
  Params,
  PyTree,
  Sampling,
)


class Inputs(NamedTuple):
  """What a generation begins with; `decode.generate` says what they are."""

  prompt: Array  # [B, P]
  prompt_length: Array  # [B]
  key: Array
  sampling: Sampling
  limit: Array  # [B]
  index: Array  # [B]


class Places(NamedTuple):
  """Where the models lie; `draft` None where the drafter has no cache."""

  target: sharding.Placement
  draft: sharding.Placement | None = None


class Programs(NamedTuple):
  """Jitted, and the shardings of what they take and give."""

  start: Callable[[Params, Inputs], DecodeState]
  run: Callable[[Params, DecodeState, Array, Array], DecodeState]
  inputs: Inputs  # of shardings
  state: DecodeState  # of shardings
  shapes: DecodeState  # of ShapeDtypeStructs, with them


def of_inputs(inputs: Inputs, places: Places) -> Inputs:
  """Their shardings: rows are split, the key is not."""
  rows, whole = (places.target.sharding(n) for n in (("rows",), ()))
  return jax.tree.map(lambda _: rows, inputs)._replace(key=whole)


def on_mesh(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: PyTree,
  inputs: Inputs,
  max_length: int,
  places: Places,
) -> Programs:
  """Arguments as of `decode.start`; arrays or their shapes will do.

  Args:
    params: leaves say by their `sharding` where they lie.

  Raises:
    ValueError: the rows do not divide over the mesh.
  """

  def start(params: Params, inputs: Inputs) -> DecodeState:
    return decode.start(
      target,
      drafter,
      rule,
      params,
      inputs.prompt,
      inputs.prompt_length,
      inputs.key,
      max_length=max_length,
      sampling=inputs.sampling,
      limit=inputs.limit,
      index=inputs.index,
    )

  def run(params, state, eos_ids, max_rounds):
    return decode.run(target, drafter, rule, params, state, eos_ids, max_rounds)

  shapes = jax.eval_shape(start, params, inputs)
  weights = jax.tree.map(lambda x: x.sharding, params)
  given = of_inputs(inputs, places)
  state = sharding.of_state(shapes, *places)
  whole = places.target.sharding(())
  return Programs(
    jax.jit(start, in_shardings=(weights, given), out_shardings=state),
    jax.jit(
      run,
      in_shardings=(weights, state, whole, whole),
      out_shardings=state,
      donate_argnums=1,
    ),
    given,
    state,
    jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      state,
    ),
  )
