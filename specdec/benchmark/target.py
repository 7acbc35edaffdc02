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
  places: Places | None = None  # of target and drafter on a mesh
  fingerprint: dict[str, str] | None = None  # what heads were trained for
  identity: tuple = ()  # Setup.identity of whom it was loaded for
  drafts: dict[str, Checkpoint] | None = None  # draft models loaded before
  abstract: bool = False  # weights are shapes; nothing is read or allocated

  @property
  def draft_place(self):
    """The placement of the drafter on the mesh, None without one."""
    return self.places and self.places.draft


class Weighted(NamedTuple):
  """A drafter and its weights, None where it has none."""

  drafter: Drafter
  params: PyTree = None


def config_of(
  source, dtype: str, weights: str | None = None, kv: str | None = None
) -> TransformerConfig:
  """Returns the config of a preset or a checkpoint; reads no weights."""
  if str(source).startswith(PRESET):
    form = weight_formats.parse(weights)
    if form is not None and form.kind == STORED:
      raise ValueError(f"weights = {weights}: {source} has no file")
    config = presets.get(str(source).removeprefix(PRESET), dtype)
    return dataclasses.replace(config, weights=form, kv=kv)
  config = checkpoints.inspect(source, dtype, weight_formats.parse(weights))
  return dataclasses.replace(config, kv=kv)


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


def with_kv(checkpoint: Checkpoint, kv: str | None) -> Checkpoint:
  """Returns a checkpoint whose cache holds this type; None: its dtype."""
  config = dataclasses.replace(checkpoint.config, kv=kv)
  return dataclasses.replace(checkpoint, config=config)
