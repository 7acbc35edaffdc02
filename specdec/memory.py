"""What a generation needs in memory, said before anything is loaded.

Bytes are per device; the plan counts what scales with the request and leaves
compiled programs, the runtime and padding (a TPU fills tiles of 8 x 128) to a
stated margin.
"""

import dataclasses
import math

import jax

from specdec.analysis import hardware
from specdec.checkpoints import names
from specdec.models.config import TransformerConfig
from specdec.programs import Places
from specdec.sharding import CACHE, Placement

_MARGIN = 1.1  # activations, programs and allocator rounding
_GIB = 2**30
_MODELS = ("target", "draft")
_LOADED = (*_MODELS, "drafter")


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes on each device, by what they are for."""

  parts: dict[str, float]

  @property
  def needed(self) -> int:
    """With a margin for programs."""
    return int(_MARGIN * sum(self.parts.values()))

  @property
  def besides_weights(self) -> "Plan":
    """What is still to come once the models are loaded."""
    parts = {n: x for n, x in self.parts.items() if n not in _LOADED}
    return Plan(parts)

  def __str__(self) -> str:
    said = (f"{name} {x / _GIB:.2f}" for name, x in self.parts.items())
    return f"{self.needed / _GIB:.2f} GiB ({', '.join(said)}; a tenth more)"


def _bytes_of(config: TransformerConfig) -> int:
  return 4 if config.dtype == "float32" else 2


def _share(axes, place: Placement | None) -> int:
  """Over how many devices a leaf with these axes is split."""
  if place is None:
    return 1
  return math.prod(place.ways(axis) for axis in axes if axis)


def weight_bytes(
  config: TransformerConfig, place: Placement | None = None
) -> float:
  """Bytes of a model's parameters in its own dtype, on each device."""
  return _bytes_of(config) * sum(
    math.prod(row.shape) / _share(row.axes, place)
    for row in names.expected(config)
  )


def cache_bytes(
  config: TransformerConfig,
  batch: int,
  slots: int,
  place: Placement | None = None,
) -> float:
  """Bytes of a K/V cache on each device."""
  whole = config.cache_bytes_per_token * _padded(batch, place) * slots
  return whole / _share(CACHE, place)


def _padded(batch: int, place: Placement | None) -> int:
  """Rows, those that stand empty so that the mesh divides them included."""
  ways = _share(("rows",), place)
  return -(-batch // ways) * ways


def available(place: Placement | None = None) -> int | None:
  """Free bytes of each device, of the mesh if one is given; None where nobody
  says.
  """
  free = hardware.device_memory()[1]
  if free is None or jax.default_backend() != "cpu":
    return free
  # Devices of one machine share its memory.
  return free // (len(place.mesh.local_devices) if place else 1)


def plan(
  target: TransformerConfig,
  draft: TransformerConfig | None,
  *,
  batch: int,
  max_length: int,
  num_nodes: int,
  places: Places | None = None,
  learned: int = 0,
  serving: int = 0,
) -> Plan:
  """What each device must hold.

  Args:
    max_length: prompt and output of a row.
    num_nodes: of a draft; logits and laws are [batch, num_nodes, V].
    learned: bytes of a drafter's weights, which every device has whole.
    serving: of its caches and of what it reads (learned/size.py).
  """
  places = places or (None, None)
  models = {
    name: found
    for name, *found in zip(_MODELS, (target, draft), places)
    if found[0] is not None
  }
  slots = max_length + num_nodes
  parts = {name: weight_bytes(*found) for name, found in models.items()}
  if learned:
    parts["drafter"] = learned
  parts["K/V caches"] = sum(
    cache_bytes(m, batch, slots, place) for m, place in models.values()
  )
  if serving:
    parts["drafter's streams"] = serving / _share(("rows",), places[0])
  rows = _padded(batch, places[0])
  laws = 4 * 4 * rows * num_nodes * target.vocab_size
  parts["logits"] = laws / _share(("rows", None, "vocab"), places[0])
  return Plan(parts)


def training(
  model: TransformerConfig,
  target: TransformerConfig | None = None,
  place: Placement | None = None,
  target_place: Placement | None = None,
) -> Plan:
  """What each device must hold to train a model, activations left out.

  Args:
    target: a frozen one that it is distilled from.
  """
  own = weight_bytes(model, place)  # float32, as training's weights are
  parts = {"weights": own, "gradients": own, "the optimizer's moments": 2 * own}
  if target is not None:
    parts["target"] = weight_bytes(target, target_place)
  return Plan(parts)


def check(found: Plan, place: Placement | None = None) -> None:
  """Refuses a generation that cannot fit. Arguments as of `available`.

  Raises:
    MemoryError: what is needed, what there is, and what to make smaller.
  """
  free = available(place)
  if free is not None and found.needed > free:
    raise MemoryError(
      f"each device needs {found}, and {free / _GIB:.2f} GiB are free; take "
      "less of what needs most, bfloat16 or a larger --mesh"
    )
