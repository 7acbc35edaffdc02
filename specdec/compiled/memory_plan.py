"""Estimates the memory of a generation before anything is loaded.

All sizes are bytes on each device. An accelerator's plan counts what scales
with the request and leaves compiled programs, the runtime and padding (a TPU
fills tiles of 8 x 128) to a stated margin. A CPU's plan is for the peak of the
whole process, which compiles its programs itself; file pages that the system
can drop at will are not in it. Its coefficients were read off the buffers that
XLA assigns and off the peaks of processes (tests/memory_plan_test.py).
"""

import dataclasses
import math
from collections.abc import Iterable

import jax

from specdec import cache as kv
from specdec.cache import CHUNK
from specdec.models import layouts, params
from specdec.models.config import TransformerConfig
from specdec.programs import Places
from specdec.roofline import hardware
from specdec.sharding import CACHE, Placement

_MARGIN = 1.1  # activations, programs and allocator rounding
_GIB = 2**30
_MODELS = ("target", "draft")
_LOADED = (*_MODELS, "drafter", "allocator")
_RUNTIME = 0.25 * _GIB  # bytes of Python and JAX
_COMPILER = 0.25 * _GIB  # of XLA once it has compiled,
_PROGRAMS = 6 * 2**20  # and of its programs, each layer of a model
_MAPPED = 32 * 2**20  # larger buffers glibc gives back whole; freed smaller
_HOLES = 0.5  # ones leave holes of so many times the size of those in use,
_REUSED = 1.5  # those that each pass takes anew of more
_DRAWING = {"float32": 12, "bfloat16": 16}  # bytes of random bits, each weight


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes on each device, by what they are for."""

  parts: dict[str, float]

  @property
  def needed(self) -> int:
    """With a margin for programs."""
    return int(_MARGIN * sum(self.parts.values()))

  @property
  def excluding_weights(self) -> "Plan":
    """What is still to come once the models are loaded."""
    parts = {n: x for n, x in self.parts.items() if n not in _LOADED}
    return Plan(parts)

  def __str__(self) -> str:
    sizes = {name: f"{x / _GIB:.2f}" for name, x in self.parts.items()}
    parts = (f"{name} {x}" for name, x in sizes.items() if float(x))
    return f"{self.needed / _GIB:.2f} GiB ({', '.join(parts)}; a tenth more)"


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
    math.prod(spec.shape) / _share(spec.axes, place)
    for spec in params.specs(config).values()
  )


def cache_bytes(
  config: TransformerConfig,
  batch: int,
  slots: int,
  place: Placement | None = None,
) -> float:
  """Bytes of a KV cache on each device."""
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
  prompt_size: int = 0,
  random_weights: bool = False,
  cpu: bool = False,
) -> Plan:
  """Estimates the bytes that each device must hold, at its peak.

  Args:
    max_length: prompt and output of a row.
    num_nodes: of a draft; logits and distributions are [batch, num_nodes, V].
    learned: bytes of a drafter's weights, which every device has whole.
    serving: of its caches and of what it reads (learned/size.py).
    prompt_size: P, tokens of the prompt buffer; 0: unknown.
    random_weights: they are drawn, not read.
    cpu: the devices are this process's share of a CPU.
  """
  places = places or (None, None)
  models = {
    name: (config, place)
    for name, config, place in zip(_MODELS, (target, draft), places)
    if config is not None
  }
  chunk = min(CHUNK, prompt_size)
  slots = max(max_length + num_nodes, prompt_size + chunk)
  if cpu:
    slots = kv.num_slots(slots)
  weights = {name: weight_bytes(*model) for name, model in models.items()}
  if learned:
    weights["drafter"] = learned
  decoding = {
    "KV caches": sum(
      cache_bytes(m, batch, slots, place) for m, place in models.values()
    )
  }
  if serving:
    decoding["drafter's streams"] = serving / _share(("rows",), places[0])
  rows = _padded(batch, places[0])
  distributions = 4 * 4 * rows * num_nodes * target.vocab_size
  decoding["logits"] = distributions / _share(
    ("rows", None, "vocab"), places[0]
  )
  if not cpu:
    return Plan(weights | decoding)

  tokens = [num_nodes, 1]  # of a pass of the target, and of the draft
  prefill = [_pass_bytes(*m, batch, chunk, slots) for m in models.values()]
  rounds = [
    _pass_bytes(*model, batch, count, slots, head=True)
    for model, count in zip(models.values(), tokens)
  ]
  # The prompt passes one model after the other; a round's loop has both.
  copies, activations = max(*prefill, tuple(map(sum, zip(*rounds))), key=sum)
  decoding |= {"copies of weights": copies, "activations": activations}
  devices = len(places[0].mesh.local_devices) if places[0] else 1
  configs = [config for config, _ in models.values()]
  layers = sum(config.num_layers for config in configs)
  decoding["programs"] = (_COMPILER + _PROGRAMS * layers) / devices
  if places[0] is None:  # packing frees every matrix
    sizes = (size for config in configs for size in _tensor_bytes(config))
    decoding["allocator"] = _HOLES * sum(s for s in sizes if s < _MAPPED)
  drawing = {}
  if random_weights:
    drawing = {"random bits of weights": _drawing_bytes(configs)}
  peak = max(decoding, drawing, key=lambda parts: sum(parts.values()))
  return Plan({"runtime": _RUNTIME / devices} | weights | peak)


def _pass_bytes(
  config: TransformerConfig,
  place: Placement | None,
  batch: int,
  tokens: int,
  slots: int,
  head: bool = False,
) -> tuple[float, float]:
  """Estimates the bytes (copies of weights, activations) of a pass on a CPU.

  XLA multiplies in float32, and many tokens by unpacked matrices; it keeps both
  forms of all matrices for the whole loop of passes.

  Args:
    tokens: of each row.
    head: logits are computed.
  """
  rows = _padded(batch, place) / _share(("rows",), place)
  size = _bytes_of(config)
  weights = weight_bytes(config, place)
  copies = 0
  if rows * tokens > layouts.FEW:
    table = size * config.vocab_size * config.width / _share(("vocab",), place)
    copies += weights - (0 if head else (2 - config.tied) * table)
  if size < 4:
    copies += 4 / size * weights
  scores = config.num_heads / _share(("query",), place) * slots
  inner = config.mlp_width * max(1, config.num_experts)
  inner /= _share(("mlp",), place)
  values = max(2 * scores, 3 * inner) + 3 * config.width
  return copies, (1 + _REUSED) * 4 * rows * tokens * values


def _tensor_bytes(config: TransformerConfig) -> list[int]:
  """Bytes of each tensor, in the order in which they are drawn."""
  size = _bytes_of(config)
  return [size * math.prod(s.shape) for s in params.specs(config).values()]


def _drawing_bytes(models: Iterable[TransformerConfig]) -> float:
  """Estimates what drawing weights one by one needs beyond all of them."""
  there = most = 0
  for config in models:
    for size in _tensor_bytes(config):
      there += size
      bits = _DRAWING[config.dtype] / _bytes_of(config) * size
      most = max(most, there + bits)
  return max(0, most - there)


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
    # XLA multiplies in float32 on a CPU: bfloat16 would take more there.
    cpu = jax.default_backend() == "cpu"
    raise MemoryError(
      f"each device needs {found}, and {free / _GIB:.2f} GiB are free; take "
      f"less of what needs most, {'float32' if cpu else 'bfloat16'} or a "
      "larger --mesh"
    )
