"""Constructs the DrafterCost of drafters that need no trained head.

Trained heads: specdec.drafters.heads.cost.
"""

import dataclasses
from typing import NamedTuple

from specdec.models.config import TransformerConfig
from specdec.roofline import shapes
from specdec.roofline.cost import BYTES
from specdec.roofline.shapes import Shape
from specdec.types import DrafterCost, Skip, Sparse, StepCost, Window


def model(
  draft: TransformerConfig | Shape, dtype: str | None = None
) -> DrafterCost:
  """Returns the cost of an independent draft model.

  Args:
    draft: its config or its shape.
    dtype: in which weights and KV are held; None: the config's, or bfloat16.
  """
  shape = draft
  if isinstance(draft, TransformerConfig):
    shape, dtype = shapes.of_config(draft), dtype or draft.dtype
  size = BYTES[dtype or "bfloat16"]
  return DrafterCost(
    weight_bytes=(shape.weight_size or size) * shape.num_parameters,
    row_bytes=_state_bytes(shape),
    position_bytes=BYTES[shape.kv or dtype or "bfloat16"] * shape.cached,
    catch_up=1,
    shape=shape,
  )


def pard(
  draft: TransformerConfig | Shape, dtype: str | None = None
) -> DrafterCost:
  """Returns the cost of a draft model that drafts from masks.

  Its one pass of a round takes the tokens that the round before may have
  committed, one a level and the pending one, and the masks after them.
  Arguments are those of `model`.
  """
  return dataclasses.replace(
    model(draft, dtype), steps=1, drafts_all=True, catch_up=0, level_catch_up=1
  )


def layer_skip(target: TransformerConfig, skip: Skip) -> DrafterCost:
  """Returns the cost of drafting with the target without some sublayers."""
  return DrafterCost(
    shape=shapes.of_config(target, skip=skip), shares_target=True
  )


def sparse(target: TransformerConfig, positions: Sparse) -> DrafterCost:
  """Returns the cost of drafting with the target and part of its KV cache."""
  return DrafterCost(shape=_reading(target, positions), shares_target=True)


def _reading(target: TransformerConfig, positions: Sparse | None) -> Shape:
  """Returns the shape of a target whose attention reads these positions."""
  shape = shapes.of_config(target)
  if positions is None:
    return shape
  size, sinks = positions

  def reading(layer):
    window = Window(size + sinks)
    if layer.window:  # which leaves no sinks
      window = layer.window._replace(size=min(layer.window.size, size))
    return layer._replace(window=window)

  layers = tuple(reading(x) if x.kv else x for x in shape.layers)
  return dataclasses.replace(shape, layers=layers)


def quantized(
  target: TransformerConfig,
  group: int,
  bits: int = 8,
  positions: Sparse | None = None,
) -> DrafterCost:
  """Returns the cost of drafting with the target's weights in int8 or int4.

  Args:
    group: weights that share a float32 scale.
    positions: of the KV cache that it reads; None: all.
  """
  shape = _reading(target, positions)
  shape = dataclasses.replace(shape, weight_size=bits / 8 + 4 / group)
  return DrafterCost(
    weight_bytes=shape.weight_size * shape.num_parameters,
    shape=shape,
    shares_target=True,
  )


def translated(
  draft: TransformerConfig, target_vocab: int, room: int, token_map: NamedTuple
) -> DrafterCost:
  """Returns the cost of a draft model with another tokenizer.

  Its passes are priced by what they read and compute, and a cached position as
  one of the target's: texts have about as many tokens of either.

  Args:
    target_vocab: token ids of the target, to which logits are moved.
    room: tokens of the draft that a row has room for, a token of the target.
    token_map: drafters.token_map.TokenMap; without `column` the draft's head
      has a row for every token of the target.
  """
  shape = shapes.of_config(draft)
  moved = 0 if token_map.column is None else draft.vocab_size
  held = shape.num_parameters
  if not moved:
    held += draft.width * (target_vocab - draft.vocab_size)
  read = held - (0 if draft.tied else shape.embedding)
  size = shape.weight_size or BYTES[draft.dtype]
  kv = BYTES[draft.kv or draft.dtype]
  tables = (x for x in token_map if x is not None)
  full = [x for x in shape.layers if not x.window]
  return DrafterCost(
    weight_bytes=size * held + sum(x.nbytes for x in tables),
    row_bytes=_state_bytes(shape),
    position_bytes=room * (kv * shape.cached + 4),
    step=StepCost(
      bytes=size * read,
      flops=2 * read,
      position_bytes=kv * sum(x.kv for x in full),
      position_flops=2 * sum(x.score for x in full),
      row_bytes=_state_bytes(shape),
      windows=tuple(
        (x.window, kv * x.kv, 2 * x.score) for x in shape.layers if x.window
      ),
      logits=moved + target_vocab,
      layers=draft.num_layers,
    ),
    catch_up=3,
  )


def _state_bytes(shape: Shape) -> float:
  """Returns bytes that recurrent layers keep for a row."""
  return sum(layer.state + layer.state_keys for layer in shape.layers)


def fallback(first: DrafterCost, other: DrafterCost) -> DrafterCost:
  """Returns the cost of drafters.fallback: both are held.

  `other` is charged in every round: a round in which `first` drafts for every
  row skips it, which is rare in a batch. Unknown plus anything is unknown.

  Raises:
    ValueError: both draft by passes of a decoder or of the target's layers, or
      by different numbers of steps.
  """
  held = {
    name: _add(getattr(first, name), getattr(other, name))
    for name in ("weight_bytes", "row_bytes", "position_bytes", "hidden_bytes")
  }
  if first.steps == 0 or other.steps == 0:
    drafts = other if first.steps == 0 else first
    if not (first.is_complete and other.is_complete):
      held["step"] = None
    return dataclasses.replace(drafts, **held)
  if first.steps != other.steps or (_has_passes(first) and _has_passes(other)):
    raise ValueError(
      "the cost of a fallback needs drafters with equal numbers of steps, of "
      "which one at most runs a decoder"
    )
  update = first.update or other.update
  if first.update and other.update:
    update = _add_steps(first.update, other.update)
  return dataclasses.replace(
    other if _has_passes(other) else first,
    **held,
    step=_add_steps(first.step, other.step),
    update=update,
    update_catch_up=max(first.update_catch_up, other.update_catch_up),
    catch_up=max(first.catch_up, other.catch_up),
    drafts_all=first.drafts_all or other.drafts_all,
  )


def _has_passes(cost: DrafterCost) -> bool:
  return cost.shape is not None or cost.exit_layer > 0


def _add(x: float | None, y: float | None) -> float | None:
  return None if x is None or y is None else x + y


def _add_steps(x: StepCost | None, y: StepCost | None) -> StepCost | None:
  if x is None or y is None:
    return None
  return StepCost(*(a + b for a, b in zip(x, y)))
