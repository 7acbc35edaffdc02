"""Targets and drafters of shapes alone: no weight is read or allocated.

They have costs and can be compiled ahead of time, but compute no text.
"""

import jax

from specdec import checkpoints
from specdec.benchmark import catalog
from specdec.benchmark.catalog import Target, Weighted
from specdec.benchmark.setup import Setup
from specdec.checkpoints import Checkpoint
from specdec.compiled import lowering
from specdec.models import transformer


def target(setup: Setup, devices=None) -> Target:
  """Returns a Setup's target, its weights shapes.

  Args:
    setup: its target is a checkpoint or a preset.
    devices: of the mesh; default all of JAX's.
  """
  source = catalog.source_of(setup.target)
  config = catalog.config_of(source, setup.dtype)
  tokenizer = None
  if any(call.place is not None for call in setup.drafter_calls):
    tokenizer = _tokenizer(source)  # a drafter of somebody's own may read it
  places = setup.places(config, devices)
  place = places and places.target
  weights = lowering.weights(config, place)
  return Target(
    transformer.model(config, place),
    Checkpoint(config, weights, tokenizer, (), str(source)),
    setup.dtype,
    random_weights=True,
    seed=setup.seed,
    places=places,
    drafts={},
    abstract=True,
  )


def _tokenizer(source):
  """Returns the tokenizer of a checkpoint; None where it has none."""
  if str(source).startswith(catalog.PRESET):
    return None
  try:
    return checkpoints.load_tokenizer(source)
  except FileNotFoundError:
    return None


def drafter(setup: Setup, target: Target) -> Weighted:
  """Returns the drafter of a Setup, its weights shapes.

  Args:
    target: as `target` returns it.

  Raises:
    ValueError: it does not fit the target, or its constructor, somebody's own,
      needs weights or a tokenizer.
  """
  try:
    weighted = setup.make_drafter(target)
  except (AttributeError, TypeError) as error:
    if all(call.place is None for call in setup.drafter_calls):
      raise
    raise ValueError(
      f"{setup.drafter} cannot be constructed for a target without weights: "
      f"{type(error).__name__}: {error}"
    ) from error
  place = target.places and target.places.target

  def shape(x):
    abstract = isinstance(x, jax.ShapeDtypeStruct)
    return x if abstract else lowering.replicated(x, place)

  return Weighted(weighted.drafter, jax.tree.map(shape, weighted.params))
