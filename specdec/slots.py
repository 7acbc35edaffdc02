"""Rows that arrive and leave: continuous batching by slot.

A state of B rows runs on while rows that are done make room: `refill` prefills
R prompts apart and puts all that a state holds of them in the rows' place, so
nothing of who was there before is left. It knows no drafter: which axis of a
leaf counts rows is read off its shapes. Invariants: a row's text depends on
its prompt, its index and the key, and on no slot, neighbour or time of arrival
(rule 4; where rows decide together how much to draft, that holds for coupled
rules alone, as draft_length.py says); one trace for any number of prompts; no
copy of a cache but of the R rows.
"""

import functools

import jax
import jax.numpy as jnp

from specdec import decode
from specdec.inputs import Inputs
from specdec.types import (
  AcceptanceRule,
  Array,
  DecodeState,
  Drafter,
  Model,
  Params,
  PyTree,
)

_PARTS = ("target", "drafter", "rule")


@functools.partial(jax.jit, static_argnames=_PARTS, donate_argnames=("state",))
@decode.in_32_bits
def refill(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  params: Params,
  state: DecodeState,
  rows: Array,
  inputs: Inputs,
) -> DecodeState:
  """Puts prompts in the place of rows of a running state.

  Whatever those rows were doing is lost: take what they wrote before. What a
  state holds of no row in particular (`Stats.widths`, whatever a drafter keeps
  for the batch as a whole) goes on as it was. `decode.run` then goes on with
  the result.

  Args:
    state: of B rows; its buffers are given to the result (donated).
    rows: [R] where each prompt goes, each in 0..B-1 and no two alike. B, or
      more, is none: it and all after it are not put anywhere.
    inputs: of R prompts, as those that the state began with: in a buffer of as
      many tokens, with as many sampling filters. `index` must be given; a
      prompt that is put nowhere may be anything of one token.

  Raises:
    ValueError: no index, or a state that began otherwise.
  """
  if inputs.index is None:
    raise ValueError(
      "inputs.index is absent: give the prompts' numbers, which name their "
      "noise; a default by row would repeat that of other prompts"
    )

  def start(inputs: Inputs) -> DecodeState:
    given = inputs._asdict() | {"max_length": state.tokens.shape[1]}
    return decode.start(target, drafter, rule, params, **given)

  batch, count = state.done.shape[0], rows.shape[0]
  fresh = start(inputs)
  axes = row_axes(state, fresh, batch, count)
  if batch == count:  # shapes that are alike say nothing
    more = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((count + 1, *x.shape[1:]), x.dtype),
      inputs._replace(key=None),
    )._replace(key=inputs.key)
    more = jax.eval_shape(start, more)
    axes = row_axes(more, fresh, count + 1, count)
  old, form = jax.tree.flatten(state)
  new = jax.tree.leaves(fresh)

  def put(i, old):
    return [
      x
      if axis is None
      else jax.lax.dynamic_update_slice_in_dim(
        x, jax.lax.dynamic_slice_in_dim(y, i, 1, axis), rows[i], axis
      )
      for x, y, axis in zip(old, new, axes)
    ]

  # A scatter would do, but on a TPU it writes all of a cache (cache.write).
  arriving = jnp.sum(jnp.cumprod((rows < batch).astype(jnp.int32)))
  return jax.tree.unflatten(form, jax.lax.fori_loop(0, arriving, put, old))


def row_axes(
  whole: PyTree, part: PyTree, batch: int, count: int
) -> list[int | None]:
  """Finds the axis of each leaf that counts rows; None: it is of no row.

  Args:
    whole, part: arrays or shapes of two states alike, of so many rows.
    batch, count: rows of each.

  Raises:
    ValueError: names a leaf that differs in more than its rows.
  """
  if jax.tree.structure(whole) != jax.tree.structure(part):
    raise ValueError(
      "the running state and that of the arriving prompts do not hold the "
      "same things: take the drafter, rule, sampling filters and source that "
      "the state was started with"
    )
  axes: list[int | None] = []
  for (path, x), y in zip(
    jax.tree.leaves_with_path(whole), jax.tree.leaves(part)
  ):
    differ = [i for i, (m, n) in enumerate(zip(x.shape, y.shape)) if m != n]
    sizes = [(x.shape[i], y.shape[i]) for i in differ]
    alike = x.ndim == y.ndim and x.dtype == y.dtype
    if not alike or sizes not in ([], [(batch, count)]):
      raise ValueError(
        f"state{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)} of "
        f"{batch} rows and {y.dtype}{list(y.shape)} of {count} arriving ones; "
        "they may differ in the axis of rows alone: refill with the drafter "
        "and the buffers of prompt and source that the state was started with"
      )
    axes.append(differ[0] if differ else None)
  return axes
