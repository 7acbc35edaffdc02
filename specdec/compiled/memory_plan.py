"""Estimates per-device memory and checks it before loading weights.

All sizes are bytes per device. An accelerator's plan counts what scales with
the request; compiled programs, the runtime and padding (a TPU pads to tiles of
8 x 128) are covered by a margin. A CPU's plan estimates the peak of the whole
process, compilation included, without reclaimable file pages. Its coefficients
were fitted to XLA's buffer assignments and to peak resident sizes
(tests/memory_plan_test.py).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from specdec import cache as kv
from specdec.cache import CHUNK
from specdec.models import cpu_kernels, layouts, params
from specdec.models.config import TransformerConfig
from specdec.roofline import hardware
from specdec.roofline.cost import BYTES
from specdec.sharding import CACHE, RECURRENT, STATE, Placement, Places
from specdec.types import NO_COST, DrafterCost

_MARGIN = 1.1  # activations, programs and allocator rounding
_GIB = 2**30
_MODELS = ("target", "draft")
_LOADED = (*_MODELS, "drafter", "allocator")
_LABELS = {
  "runtime": "Python and JAX",
  "programs": "compiled programs",
  "allocator": "fragmentation",
}
_RUNTIME = 0.25 * _GIB  # bytes of Python and JAX
_COMPILER = 0.22 * _GIB  # bytes of XLA after compiling
_PROGRAMS = 6 * 2**20  # bytes of compiled programs per layer of a model
_MAPPED = 32 * 2**20  # glibc's mmap threshold: larger ones are unmapped whole
_HOLES = 0.5  # fragmentation by freed smaller buffers, relative to their size
_REUSED = 1.5  # fragmentation by activations, which every pass allocates anew
_DRAWING = {"float32": 12, "bfloat16": 16}  # bytes of random bits per weight


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes per device, by use."""

  parts: dict[str, float]
  caveat: str = ""  # what the plan leaves out

  @property
  def needed(self) -> int:
    """Total bytes, with a margin for programs."""
    return int(_MARGIN * sum(self.parts.values()))

  @property
  def excluding_weights(self) -> "Plan":
    """The plan of what is allocated after the models are loaded."""
    parts = {n: x for n, x in self.parts.items() if n not in _LOADED}
    return Plan(parts, self.caveat)

  def __str__(self) -> str:
    sizes = [(name, f"{x / _GIB:.2f}") for name, x in self.parts.items()]
    parts = [f"{_LABELS.get(name, name)} {x}" for name, x in sizes if float(x)]
    text = f"{', '.join(parts) or 'next to nothing'}, and a tenth to spare"
    text = f"{self.needed / _GIB:.2f} GiB of memory ({text})"
    return f"{text}; {self.caveat}" if self.caveat else text


def _share(axes, place: Placement | None) -> int:
  """Returns over how many devices a leaf with these axes is split."""
  if place is None:
    return 1
  return math.prod(place.ways(axis) for axis in axes if axis)


def weight_bytes(
  config: TransformerConfig, place: Placement | None = None
) -> float:
  """Returns bytes of a model's parameters as they are held, per device."""
  return sum(
    leaf.nbytes / _share(leaf.axes, place)
    for spec in params.held(config).values()
    for leaf in params.leaves(spec)
  )


def cache_bytes(
  config: TransformerConfig,
  batch: int,
  slots: int,
  place: Placement | None = None,
) -> float:
  """Returns bytes of a KV cache, per device, recurrent states included."""
  rows = _padded(batch, place)
  whole = config.cache_bytes_per_token * rows * slots / _share(CACHE, place)
  if r := config.recurrence:
    states, keys = (len(r.layers) * x for x in r.row_bytes(config.dtype))
    whole += rows * states / _share(STATE, place)
    whole += rows * keys / _share(RECURRENT.keys, place)
  return whole


def _padded(batch: int, place: Placement | None) -> int:
  """Rounds the number of rows up to a multiple of the mesh's row shards."""
  ways = _share(("rows",), place)
  return -(-batch // ways) * ways


def available(place: Placement | None = None) -> int | None:
  """Returns free bytes per device (of the mesh); None where unreported."""
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
  drafter: DrafterCost = NO_COST,
  prompt_size: int = 0,
  random_weights: bool = False,
  cpu: bool = False,
) -> Plan:
  """Estimates peak bytes per device.

  Args:
    max_length: tokens of a row, prompt and output; of an encoder-decoder the
      output.
    num_nodes: nodes of a draft; logits and probabilities are
      [batch, num_nodes, V].
    drafter: what the drafter holds besides `draft`, on one device.
      Unknown sizes are left out, with a caveat.
    prompt_size: P, tokens of the prompt buffer, or of the encoder's source; 0:
      unknown.
    random_weights: weights are drawn at random, not loaded.
    cpu: the devices are this process's share of a CPU.
  """
  places = places or (None, None)
  models = {
    name: (config, place)
    for name, config, place in zip(_MODELS, (target, draft), places)
    if config is not None
  }
  given = 1 if target.encoder_layers else prompt_size
  chunk = min(CHUNK, given)
  slots = max(max_length + num_nodes, given + chunk)
  if cpu:
    slots = kv.num_slots(slots)
  weights = {name: weight_bytes(*model) for name, model in models.items()}
  if drafter.weight_bytes:
    weights["drafter"] = drafter.weight_bytes
  caveat = "" if drafter.is_complete else "the drafter's memory is unknown"
  caches = (cache_bytes(m, batch, slots, place) for m, place in models.values())
  decoding = {"KV caches": sum(caches)}
  decoding["KV caches"] += sum(
    cache_bytes(config, batch, prompt_size, place)
    for config, place in models.values()
    if config.encoder_layers
  )
  rows = _padded(batch, places[0])
  position = (drafter.position_bytes or 0) + drafter.hidden_bytes
  state = rows * ((drafter.row_bytes or 0) + max_length * position)
  if state:
    decoding["drafter's state"] = state / _share(("rows",), places[0])
  distributions = 4 * 4 * rows * num_nodes * target.vocab_size
  shards = _share(("rows", "vocab"), places[0])
  decoding["logits"] = distributions / shards
  if not cpu:
    return Plan(weights | decoding, caveat)

  prefill = [_pass_bytes(*m, batch, chunk, slots) for m in models.values()]
  prefill += [
    _pass_bytes(config, place, batch, prompt_size, prompt_size)
    for config, place in models.values()
    if config.encoder_layers
  ]
  rounds = [  # tokens per row, of a target pass and of a draft pass
    _pass_bytes(*model, batch, tokens, slots, head=True)
    for model, tokens in zip(models.values(), (num_nodes, 1))
  ]
  # Prefill runs one model after the other; a round's loop holds both.
  copies, activations = max(*prefill, tuple(map(sum, zip(*rounds))), key=sum)
  decoding |= {"copies of weights": copies, "activations": activations}
  devices = len(places[0].mesh.local_devices) if places[0] else 1
  configs = [config for config, _ in models.values()]
  layers = sum(config.num_layers for config in configs)
  decoding["programs"] = (_COMPILER + _PROGRAMS * layers) / devices
  if places[0] is None:  # packing reallocates every matrix
    sizes = (size for config in configs for size in _tensor_bytes(config))
    decoding["allocator"] = _HOLES * sum(s for s in sizes if s < _MAPPED)
  bits = _drawing_bytes(configs if random_weights else [])
  drawing = {"random bits of weights": bits}
  # Quantised are matrices that have been read as float32.
  whole = [_tensor_bytes(config) for config in configs if config.weights]
  loading = {"the largest matrix": 2 * max(map(max, whole), default=0)}
  peak = max(decoding, drawing, loading, key=lambda parts: sum(parts.values()))
  return Plan({"runtime": _RUNTIME / devices} | weights | peak, caveat)


def _pass_bytes(
  config: TransformerConfig,
  place: Placement | None,
  batch: int,
  tokens: int,
  slots: int,
  head: bool = False,
) -> tuple[float, float]:
  """Estimates bytes (copies of weights, activations) of a pass on a CPU.

  The kernels multiply weights as they are held. XLA multiplies in float32, and
  many tokens with unpacked matrices; it keeps both forms of all matrices alive
  throughout the decoding loop.

  Args:
    tokens: per row.
    head: the pass computes logits.
  """
  rows = _padded(batch, place) / _share(("rows",), place)
  size = BYTES[config.dtype]
  weights = weight_bytes(dataclasses.replace(config, weights=None), place)
  weights -= _expert_bytes(config, place)  # converted one after another
  copies = 0
  # The kernels multiply neither on a mesh nor by experts.
  on_mesh_or_experts = place is not None or config.num_experts > 0
  if on_mesh_or_experts or not cpu_kernels.available():
    if config.weights is not None or size < 4:
      copies = 4 / size * weights
    if config.weights is None and rows * tokens > layouts.MAX_BLOCKED_TOKENS:
      table = size * config.vocab_size * config.width
      table /= _share(("vocab",), place)
      copies += weights - (0 if head else (2 - config.tied) * table)
  scores = config.num_heads / _share(("query",), place) * slots
  columns = ("expert_mlp",) if config.num_experts else ("mlp",)
  inner = config.mlp_width / _share(columns, place)
  inner += config.shared_width / _share(("shared",), place)
  inner = max(inner, config.dense_width / _share(("dense",), place))
  values = max(2 * scores, 3 * inner) + 3 * config.width
  return copies, (1 + _REUSED) * 4 * rows * tokens * values


def _expert_bytes(config: TransformerConfig, place: Placement | None) -> float:
  """Returns bytes of a mixture's experts, unquantised, per device."""
  values = (
    math.prod(x.shape) / _share(x.axes, place)
    for x in params.specs(config).values()
    if "experts" in x.axes
  )
  return BYTES[config.dtype] * sum(values)


def _tensor_bytes(config: TransformerConfig) -> list[int]:
  """Returns bytes of each tensor, in the order of initialisation."""
  size = BYTES[config.dtype]
  return [size * math.prod(s.shape) for s in params.specs(config).values()]


def _drawing_bytes(models: Sequence[TransformerConfig]) -> float:
  """Estimates peak bytes of random initialisation beyond the weights."""
  allocated = peak = 0
  for config in models:
    for size in _tensor_bytes(config):
      allocated += size
      bits = _DRAWING[config.dtype] / BYTES[config.dtype] * size
      peak = max(peak, allocated + bits)
  held = sum(weight_bytes(config) for config in models)
  return max(0, peak - held)


def training(size: float, frozen: float = 0) -> Plan:
  """Estimates bytes per device to train, without activations.

  Args:
    size: bytes of the trained weights on a device, in float32; two moments
      each, AdamW's (Muon keeps one of matrices).
    frozen: of a target that is not trained.
  """
  names = ("weights", "gradients", "the optimizer's moments")
  parts = dict(zip(names, (size, size, 2 * size)))
  return Plan(parts | ({"target": frozen} if frozen else {}))


def check(estimate: Plan, place: Placement | None = None) -> None:
  """Checks that a plan fits into the free memory of each device.

  Raises:
    MemoryError: it does not; names the sizes and what to reduce.
  """
  free = available(place)
  if free is not None and estimate.needed > free:
    # XLA multiplies in float32 on a CPU, so bfloat16 would need more there.
    cpu = jax.default_backend() == "cpu"
    raise MemoryError(
      f"each device needs {estimate}, and {free / _GIB:.2f} GiB are free; "
      f"reduce the largest part, use {'float32' if cpu else 'bfloat16'} or a "
      "larger --mesh"
    )
