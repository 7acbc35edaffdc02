"""Counts weights, cached values and multiply-adds of decoders by layer."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specdec import sharding
from specdec.models import params, presets
from specdec.models.config import TransformerConfig
from specdec.types import Skip, Window
from specdec.utils.spelling import choices


class Layer(NamedTuple):
  """Counts of one decoder layer: weights, cached values, multiply-adds."""

  weights: int  # dense, used by every token: attention, MLP, router, norms
  kv: int  # values cached per position
  kv_heads: int  # parts into which the cache can be sharded
  score: int  # multiply-adds of attention per token and cached position
  # Of the weights, those that every chip of a mesh holds whole (norms, a
  # router), and those split at most kv_heads ways (K and V projections).
  replicated: int = 0
  key_weights: int = 0
  window: Window | None = None  # of its attention; None: it sees all
  expert: int = 0  # weights of one expert
  num_experts: int = 0
  per_token: int = 0  # experts routed to per token
  source_kv: int = 0  # values of cross-attention, in the deployment's dtype
  source_score: int = 0  # score of cross-attention
  # Bytes that a recurrent layer keeps per row: states and slots of its heads,
  # slots of its key heads (as many as kv_heads). Every pass reads them
  state: int = 0
  state_keys: int = 0
  inputs: int = 0  # but for these, which only folds read
  input_keys: int = 0
  slot: int = 0  # and of them those of a position's slots
  slot_keys: int = 0
  slack: int = 0  # Recurrence.slack,
  num_nodes: int = 0  # and of it: passes of more tokens keep nothing

  def weights_on(self, ways: int) -> float:
    """Returns the dense weights on each of the chips that split the layer."""
    split = self.weights - self.replicated - self.key_weights
    key = self.key_weights / self.key_ways(ways)
    return self.replicated + key + split / ways

  def key_ways(self, ways: int) -> int:
    """Returns how many of the chips have different KV heads: none is split."""
    return min(ways, self.kv_heads)


@dataclasses.dataclass(frozen=True)
class Shape:
  """The sizes of a decoder that its cost depends on."""

  name: str
  layers: tuple[Layer, ...]
  width: int
  vocab_size: int
  num_heads: int
  tied: bool  # embedding and vocabulary projection share one table
  idle: int = 0  # weights held that decoding never reads, such as an encoder
  weight_size: float | None = None  # bytes; None: of a deployment's dtype
  kv: str | None = None  # dtype of cached values; None: a deployment's

  @property
  def embedding(self) -> int:
    """Weights of the embedding table, and of the vocabulary projection."""
    return self.vocab_size * self.width

  @property
  def num_parameters(self) -> int:
    """Weights held in memory, including those that decoding never reads."""
    layers = sum(x.weights + x.num_experts * x.expert for x in self.layers)
    return self.idle + layers + self.embedding * (1 if self.tied else 2)

  @property
  def cached(self) -> int:
    """KV values per position, all layers."""
    return sum(layer.kv for layer in self.layers)

  def counted(self, start: int, stop: int) -> Iterator[tuple[Layer, int]]:
    """Yields the distinct layers of start..stop-1 with their counts."""
    yield from collections.Counter(self.layers[start:stop]).items()


# Axes of parameters that a mesh splits, and those of KV heads.
_ALL, _KEYS = ("key", "group"), ("key",)
_SPLIT = sharding.Rules(
  query=_ALL, key=_KEYS, mlp=_ALL, experts=_ALL, state=_ALL, state_key=_KEYS
)
_NO_CACHE = {"kv": 0, "score": 0, "source_kv": 0, "source_score": 0}
_NO_STATE = dict.fromkeys(
  ("state", "state_keys", "inputs", "input_keys", "slot", "slot_keys"), 0
)


def of_config(
  config: TransformerConfig, name: str = "", skip: Skip | None = None
) -> Shape:
  """Returns the shape of a TransformerConfig, without its final norm.

  Args:
    skip: sublayers to leave out; a layer with neither sublayer is dropped.
  """
  c = config
  mlp = (3 if c.gated else 2) * c.width * c.mlp_width
  specs = params.specs(c)
  by_layer = collections.defaultdict(dict)  # 'layer_3' -> path below -> spec
  for path, spec in specs.items():
    layer, _, rest = path.partition("/")
    by_layer[layer][rest] = spec
  kv, score = c.kv_size, c.score_size
  experts = [
    0 if i in c.dense_layers else c.num_experts for i in range(c.num_layers)
  ]

  def dense(i: int, *below: str) -> dict[str, int]:
    """Counts a layer's weights but for experts, of paths that begin so."""
    of_layer = by_layer[f"layer_{i}"].items()
    counts = _counts(spec for path, spec in of_layer if path.startswith(below))
    return counts | {"weights": counts["weights"] - experts[i] * mlp}

  layers = [
    Layer(
      **dense(i, ""),
      kv=kv,
      kv_heads=c.num_kv_heads,
      score=score,
      window=window and Window(window, window if c.chunked else None),
      expert=mlp if experts[i] else 0,
      num_experts=experts[i],
      per_token=c.experts_per_token if experts[i] else 0,
      source_kv=2 * c.num_kv_heads * c.head_dim if c.encoder_layers else 0,
      source_score=score if c.encoder_layers else 0,
    )
    for i, window in enumerate(c.windows or (None,) * c.num_layers)
  ]
  if r := c.recurrence:
    state, state_keys = r.row_bytes(c.dtype)
    slot, slot_keys = r.slot_bytes(c.dtype)
    inputs, input_keys = r.input_bytes(c.dtype)
    for i in r.layers:
      layers[i] = layers[i]._replace(
        **_NO_CACHE,
        kv_heads=r.num_key_heads,
        state=state,
        state_keys=state_keys,
        inputs=inputs,
        input_keys=input_keys,
        slot=slot,
        slot_keys=slot_keys,
        slack=r.slack,
        num_nodes=r.num_nodes,
      )
  if skip is not None:
    inside = [dense(i, "mlp/", "shared") for i in range(c.num_layers)]
    layers = _without(layers, skip, inside)
  name = name or f"{c.num_parameters / 1e6:.3g} M"
  shared = c.width, c.vocab_size, c.num_heads, c.tied
  weight_size = None if c.weights is None else params.read_size(c)
  encoder = (x for path, x in specs.items() if path.startswith(params.ENCODER))
  idle = sum(math.prod(x.shape) for x in encoder)
  return Shape(name, tuple(layers), *shared, idle, weight_size, c.kv)


def _counts(specs: Iterable[params.ParamSpec]) -> dict[str, int]:
  """Returns fields of Layer: weights, and which of them a mesh does not split
  as often as query heads."""
  counts = collections.Counter(weights=0, replicated=0, key_weights=0)
  for spec in specs:
    size = math.prod(spec.shape)
    over = {getattr(_SPLIT, axis or "", ()) for axis in spec.axes} - {()}
    counts["weights"] += size
    if not over:
      counts["replicated"] += size
    elif over == {_KEYS}:
      counts["key_weights"] += size
  return dict(counts)


def _without(
  layers: list[Layer], skip: Skip, mlps: Sequence[dict[str, int]]
) -> list[Layer]:
  """Removes skipped sublayers.

  Args:
    mlps: counts of the weights of each layer's MLP but for its experts.
  """
  kept = []
  for i, (layer, mlp) in enumerate(zip(layers, mlps)):
    if i in skip.attention:
      layer = layer._replace(**mlp, **_NO_CACHE, window=None, **_NO_STATE)
    if i in skip.mlp:
      rest = {name: getattr(layer, name) - size for name, size in mlp.items()}
      layer = layer._replace(**rest, expert=0, num_experts=0, per_token=0)
    if layer.weights:
      kept.append(layer)
  return kept


def names() -> list[str]:
  """Returns the names that `get` accepts."""
  return presets.names()


def get(name: str) -> Shape:
  """Returns the shape of a published model.

  Raises:
    ValueError: no preset has this name.
  """
  if name not in presets.names():
    raise ValueError(f"no model {name!r}; {choices(name, names())}")
  return of_config(presets.get(name, "bfloat16"), name)


def scaled(shape: Shape, share: float) -> Shape:
  """Returns a decoder whose layers have about `share` of the weights.

  Scales depth and width by the cube root of `share` and keeps vocabulary and
  number of heads. For sweeps over draft sizes that need not exist.

  Raises:
    ValueError: share is not in (0, 1].
  """
  if not 0 < share <= 1:
    raise ValueError(f"share {share:g} is outside (0, 1]")
  depth = max(1, round(len(shape.layers) * share ** (1 / 3)))
  by = (share * len(shape.layers) / depth) ** 0.5  # factor on the width
  layers = tuple(
    layer._replace(
      weights=max(1, round(layer.weights * by**2)),
      kv=max(1, round(layer.kv * by)) if layer.kv else 0,
      score=max(1, round(layer.score * by)) if layer.score else 0,
      expert=round(layer.expert * by**2),
      replicated=round(layer.replicated * by**2),
      key_weights=round(layer.key_weights * by**2),
      source_kv=round(layer.source_kv * by),
      source_score=round(layer.source_score * by),
      state=round(layer.state * by),
      state_keys=round(layer.state_keys * by),
      inputs=round(layer.inputs * by),
      input_keys=round(layer.input_keys * by),
      slot=round(layer.slot * by),
      slot_keys=round(layer.slot_keys * by),
    )
    for layer in shape.layers[:depth]
  )
  return dataclasses.replace(
    shape,
    name=f"{share:.3g} of {shape.name}",
    layers=layers,
    width=max(1, round(shape.width * by)),
    idle=0,
  )
