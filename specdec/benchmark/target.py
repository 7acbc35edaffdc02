"""What names of models stand for; what drafters' constructors take and give."""

import dataclasses
from typing import NamedTuple

from specdec import checkpoints
from specdec.checkpoints import Checkpoint
from specdec.checkpoints.fetch import fetch
from specdec.models import presets, weight_formats
from specdec.models.config import KV_TYPES, TransformerConfig
from specdec.models.weight_formats import STORED
from specdec.sharding import Places
from specdec.types import Drafter, Model, PyTree
from specdec.utils.spelling import check_choice

PRESET = "preset:"


class Target(NamedTuple):
  """The loaded target, as a drafter's constructor is given it."""

  model: Model
  checkpoint: Checkpoint
  dtype: str
  random_weights: bool
  seed: int
  places: Places | None  # of target and drafter on a mesh
  fingerprint: dict[str, str] | None  # what heads were trained for
  identity: tuple  # Setup.identity of whom it was loaded for
  drafts: dict[str, Checkpoint]  # draft models loaded before
  abstract: bool  # weights are shapes; nothing is read or allocated

  @property
  def draft_place(self):
    """The placement of the drafter on the mesh, None without one."""
    return self.places and self.places.draft


class Weighted(NamedTuple):
  """A drafter and its weights, None where it has none."""

  drafter: Drafter
  params: PyTree = None


def config_of(
  source,
  dtype: str,
  weights: str | None = None,
  kv: str | None = None,
  num_nodes: int | None = None,
) -> TransformerConfig:
  """Returns the config of a preset or a checkpoint; reads no weights."""
  if str(source).startswith(PRESET):
    form = weight_formats.parse(weights)
    if form is not None and form.kind == STORED:
      raise ValueError(f"weights = {weights}: {source} has no file")
    config = presets.get(str(source).removeprefix(PRESET), dtype)
    config = dataclasses.replace(config, weights=form)
  else:
    form = weight_formats.parse(weights)
    config = checkpoints.inspect(source, dtype, form)
  return with_cache(config, kv, num_nodes)


def source_of(name: str):
  """Returns the path that a name stands for, or a preset as it is."""
  return name if name.startswith(PRESET) else fetch(name)


def held_name(
  name: str, weights: str | None = None, kv: str | None = None
) -> str:
  """Returns a model's name with the types of its matrices and of its cache, if
  given."""
  held = f"{name}, {weights}" if weights else str(name)
  return f"{held}, kv {kv}" if kv else held


def check_kv(kv: str | None) -> None:
  """Raises ValueError for a type that no cache has."""
  if kv is not None:
    check_choice("kv", kv, KV_TYPES)


def with_cache(
  config: TransformerConfig, kv: str | None, num_nodes: int | None = None
) -> TransformerConfig:
  """Returns a config with another cache.

  Args:
    kv: type of keys and values; None: dtype.
    num_nodes: tokens of a call for which recurrent layers keep slots; None: as
      it is.

  Raises:
    ValueError: num_nodes of a model without recurrent layers.
  """
  if num_nodes is not None:
    if config.recurrence is None:
      raise ValueError(
        f"num_nodes = {num_nodes}: the target has no recurrent layers"
      )
    kept = dataclasses.replace(config.recurrence, num_nodes=num_nodes)
    config = dataclasses.replace(config, recurrence=kept)
  return dataclasses.replace(config, kv=kv)
