"""What a generation needs in memory, said before anything is loaded.

Bytes are per device; the plan counts what scales with the request and leaves
compiled programs and the runtime to a stated margin.
"""

import math
from typing import NamedTuple

import jax

from specdec.analysis import hardware
from specdec.checkpoints import names
from specdec.models.config import TransformerConfig
from specdec.programs import Places
from specdec.sharding import CACHE, Placement

_MARGIN = 1.1  # activations, programs and allocator rounding
_GIB = 2**30


class Plan(NamedTuple):
  """Bytes on each device."""

  target: float
  draft: float
  caches: float
  laws: float  # logits and laws of a draft

  @property
  def needed(self) -> int:
    """With a margin for programs."""
    return int(_MARGIN * sum(self))

  def __str__(self) -> str:
    parts = {
      "target": self.target,
      "draft": self.draft,
      "K/V caches": self.caches,
      "logits": self.laws,
    }
    said = (f"{name} {x / _GIB:.2f}" for name, x in parts.items() if x)
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
  whole = config.cache_bytes_per_token * batch * slots
  return whole / _share(CACHE, place)


def available() -> int | None:
  """Free bytes of each device, None where nobody says."""
  free = hardware.device_memory()[1]
  if free is None or jax.default_backend() != "cpu":
    return free
  return free // jax.local_device_count()  # they share the machine's


def plan(
  target: TransformerConfig,
  draft: TransformerConfig | None,
  *,
  batch: int,
  max_length: int,
  num_nodes: int,
  places: Places | None = None,
) -> Plan:
  """What each device must hold.

  Args:
    max_length: prompt and output of a row.
    num_nodes: of a draft; logits and laws are [batch, num_nodes, V].
  """
  places = places or (None, None)
  models = [
    (m, place) for m, place in zip((target, draft), places) if m is not None
  ]
  slots = max_length + num_nodes
  weights = [weight_bytes(m, place) for m, place in models]
  laws = 4 * 4 * batch * num_nodes * target.vocab_size
  return Plan(
    weights[0],
    sum(weights[1:]),
    sum(cache_bytes(m, batch, slots, place) for m, place in models),
    laws / _share(("rows", None, "vocab"), places[0]),
  )


def check(found: Plan) -> None:
  """Refuses a generation that cannot fit.

  Raises:
    MemoryError: what is needed, what there is, and what to make smaller.
  """
  free = available()
  if free is not None and found.needed > free:
    raise MemoryError(
      f"each device needs {found}, and {free / _GIB:.2f} GiB are free; take a "
      "smaller batch, fewer tokens, bfloat16 or a larger --mesh"
    )
