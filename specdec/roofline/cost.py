"""Prices a forward pass on given chips, term by term (a roofline model).

  T = overhead + attention + products + logits + collectives
  attention = p-norm(KV bytes / (e_kv BW), its operations / (e_f peak))
  products  = p-norm(weight bytes / (e_w BW), operations / (e_f peak))

p = inf is the classic roofline (Williams et al., 2009): memory and compute
overlap fully; p = 1 means no overlap. Collectives overlap with nothing: XLA
seldom hides them in decoding. Data-parallel replicas split the rows;
tensor-parallel chips split weights, heads and vocabulary and all-reduce
activations twice a layer. All counts are per chip.
"""

import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from specdec.models.config import TransformerConfig
from specdec.roofline import chips, shapes
from specdec.roofline.chips import Chip
from specdec.roofline.shapes import Shape

# All-reduces by which chips draw from parts of a distribution (sampling.warp,
# sampling.argmax): maximum, its place and the mass of the logits, then maximum
# and place of what noise makes of them. Siblings drawn without replacement take
# more, and levels that do not wait for each other (Medusa's) share the five.
DRAW = 5
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.5}


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """The share of a chip's peaks that programs reach, and fixed overheads."""

  # Shares of the bandwidth: weights read for a single token (matrix-vector
  # products have kernels of their own) and for several, KV read and written.
  one: float = 1.0
  weights: float = 1.0
  kv: float = 1.0
  flops: float = 1.0  # share of the peak FLOP/s
  p: float = math.inf  # of the norm of memory and compute time; inf: the max
  overhead: float = 0.0  # seconds per pass
  layer_overhead: float = 0.0  # seconds per layer
  # (tokens of a pass over all rows, factor on the products' time), ascending;
  # interpolated in the log of the tokens, constant outside. Captures kernel
  # effects that the formula does not.
  rows: tuple[tuple[float, float], ...] = ()

  def __post_init__(self):
    for name in ("one", "weights", "kv", "flops"):
      if not 0 < (value := getattr(self, name)) < math.inf:
        raise ValueError(
          f"efficiency {name} = {value:g}; it must be finite and > 0"
        )
    if not self.p >= 1:
      raise ValueError(f"p = {self.p}; it must be >= 1")
    for name in ("overhead", "layer_overhead"):
      if not 0 <= (value := getattr(self, name)) < math.inf:
        raise ValueError(f"{name} = {value:g}; it must be finite and >= 0")

  def combined(self, *seconds: float) -> float:
    """Returns the p-norm of times that overlap partly."""
    largest = max(seconds)
    if math.isinf(self.p) or largest == 0:
      return largest
    ratios = np.asarray(seconds) / largest
    return largest * float(np.sum(ratios**self.p)) ** (1 / self.p)

  def factor(self, tokens: float) -> float:
    """Returns the factor on the products' time of a pass of `tokens` tokens."""
    if not self.rows:
      return 1.0
    counts, factors = zip(*self.rows)
    return float(np.interp(math.log(tokens), np.log(counts), factors))


IDEAL = Efficiency()
# SpecDecode-Bench's fit to vLLM on an H100 with Llama 3.1 8B, its constant of
# 5.9 ms taken as reading the weights. Its 1.2 ms per step are the engine's host
# time, which a loop on the device does not have.
TYPICAL = Efficiency(one=0.76, weights=0.76, kv=0.996, flops=0.72, p=1.0)


class Term(NamedTuple):
  """A part of a pass, per chip."""

  name: str
  bytes: float = 0.0  # of main memory
  flops: float = 0.0
  sent: float = 0.0  # bytes to other chips
  seconds: float = 0.0  # in isolation


class Cost(NamedTuple):
  """The cost of a pass, per chip."""

  terms: tuple[Term, ...]
  seconds: float  # of the pass; less than the terms' sum where p > 1
  least: float = 0.0  # seconds to move its bytes at full bandwidth

  @property
  def bytes(self) -> float:
    return sum(term.bytes for term in self.terms)

  @property
  def flops(self) -> float:
    return sum(term.flops for term in self.terms)

  @property
  def sent(self) -> float:
    return sum(term.sent for term in self.terms)


@dataclasses.dataclass(frozen=True)
class Deployment:
  """A model, or a range of its layers, on chips.

  Raises:
    ValueError: the mesh does not divide the model, a dtype is unknown, or the
      correlation is outside [0, 1].
  """

  shape: Shape
  chip: Chip
  weights: str = "bfloat16"  # dtype in which they are stored
  kv: str = "bfloat16"
  # Dtype of the products' factors; None: that of the weights, or bfloat16 where
  # the chip has no such product (int4 is unpacked).
  compute: str | None = None
  ways: int = 1  # tensor-parallel chips, which split the weights
  replicas: int = 1  # data-parallel groups of such chips, which split the batch
  efficiency: Efficiency = IDEAL
  start: int = 0  # first layer
  stop: int | None = None  # one past the last; None: all
  head: bool = True  # the pass computes logits
  source: int = 0  # positions per row that cross-attention reads (T5)
  # r in the number of experts that m tokens touch, E (1 - (1 - k/E)^(m^r)); 1:
  # tokens route independently. Measured routers have 0.57 to 0.83.
  correlation: float = 0.75

  def __post_init__(self):
    for dtype in (self.weights, self.kv):
      if dtype not in BYTES:
        raise ValueError(f"no dtype {dtype!r}; valid: {', '.join(BYTES)}")
    if not 0 <= self.correlation <= 1:
      raise ValueError(
        f"correlation = {self.correlation:g}; it must be in [0, 1]"
      )
    if self.ways < 1 or self.replicas < 1:
      raise ValueError(
        f"ways = {self.ways}, replicas = {self.replicas}; both must be >= 1"
      )
    if not 0 <= self.start <= self.end <= len(self.shape.layers):
      raise ValueError(
        f"layers {self.start} to {self.stop}: {self.shape.name} has "
        f"{len(self.shape.layers)}"
      )
    if self.shape.num_heads % self.ways:
      raise ValueError(
        f"{self.ways} chips do not divide {self.shape.num_heads} heads of "
        f"{self.shape.name}"
      )
    for layer in set(self.shape.layers):
      if layer.kv_heads % self.ways and self.ways % layer.kv_heads:
        raise ValueError(
          f"{self.ways} chips and {layer.kv_heads} KV heads of "
          f"{self.shape.name}: neither divides the other"
        )
    self.chip.rate(self.dtype)

  @property
  def end(self) -> int:
    """One past the last layer."""
    return len(self.shape.layers) if self.stop is None else self.stop

  @property
  def dtype(self) -> str:
    """Dtype of the products' factors."""
    if self.compute:
      return self.compute
    return self.weights if self.weights in self.chip.flops else "bfloat16"

  @property
  def kv_type(self) -> str:
    """Dtype of keys and values in the cache."""
    return self.shape.kv or self.kv

  @property
  def score_type(self) -> str:
    """Dtype of attention's factors, to which eight-bit integers are converted.

    Keys and values of a source are held in it.
    """
    return "bfloat16" if self.kv == "int8" else self.kv

  @property
  def weight_size(self) -> float:
    """Bytes of a weight."""
    return self.shape.weight_size or BYTES[self.weights]

  @property
  def weight_bytes(self) -> float:
    """Bytes of the weights per chip, all layers."""
    layers = self.shape.layers
    dense = sum(x.weights_on(self.ways) for x in layers)
    split = self.shape.num_parameters - sum(x.weights for x in layers)
    return (dense + split / self.ways) * self.weight_size

  def cache_bytes(self, batch: float, context: float) -> float:
    """Returns bytes of the KV cache per chip, all layers.

    A KV head is never split: with more ways than heads chips hold copies.
    """
    rows = math.ceil(batch / self.replicas)
    size = 0.0
    for layer, count in self.shape.counted(0, len(self.shape.layers)):
      size += count * self._position_bytes(layer, context)
      size += count * self._state_bytes(layer)[0]
    return rows * size

  def moved_bytes(self, batch: float, positions: float) -> float:
    """Returns bytes per chip of so many positions of every row: of their keys
    and values, and of their slots in recurrent layers."""
    rows, size = math.ceil(batch / self.replicas), 0.0
    for layer, count in self.shape.counted(0, len(self.shape.layers)):
      size += count * positions * self._slot_bytes(layer)
    return rows * size

  def _slot_bytes(self, layer: shapes.Layer) -> float:
    """Returns bytes per chip that a position leaves in a layer."""
    slot = layer.slot_keys / layer.key_ways(self.ways) + layer.slot / self.ways
    return self._kv_bytes(layer) + slot

  def _position_bytes(self, layer: shapes.Layer, positions: float) -> float:
    """Returns bytes per chip of so many cached positions, and of the source's
    of cross-attention, which are never in eight bits."""
    source = self.source * layer.source_kv * BYTES[self.score_type]
    source /= layer.key_ways(self.ways)
    return positions * self._kv_bytes(layer) + source

  def _kv_bytes(self, layer: shapes.Layer) -> float:
    """Returns bytes per chip of a position's keys and values."""
    return layer.kv * BYTES[self.kv_type] / layer.key_ways(self.ways)

  def _state_bytes(self, layer: shapes.Layer) -> tuple[float, float]:
    """Returns bytes per chip that a recurrent layer keeps for a row, and those
    of them that every pass reads."""
    key_ways = layer.key_ways(self.ways)
    kept = layer.state / self.ways + layer.state_keys / key_ways
    return kept, kept - layer.inputs / self.ways - layer.input_keys / key_ways

  def cost(
    self, batch: float, tokens: float, context: float, committed: float = 1
  ) -> Cost:
    """Prices one pass of the layers.

    Args:
      batch: rows over all replicas.
      tokens: tokens per row; for a draft its nodes, whatever their tree.
      context: cached positions that attention reads per row.
      committed: tokens per row that such a pass commits.
    """
    rows = math.ceil(batch / self.replicas)
    m = rows * tokens
    # Float32 logits: written, then read by acceptance or sampling.
    values = m * self.shape.vocab_size / self.ways if self.head else 0
    terms = [
      *self._products(m),
      *self._attention(rows, tokens, context, committed),
      Term("logits", bytes=2 * 4 * values),
      self._collectives(m),
    ]
    return self.timed(m, terms, self.end - self.start)

  def experts_touched(self, count: int, per_token: int, tokens: float) -> float:
    """Returns how many of `count` experts some of the tokens choose."""
    return experts_touched(count, per_token, tokens, self.correlation)

  def _products(self, m: float) -> list[Term]:
    """Counts products: weights are read once and multiply all m tokens."""
    size = self.weight_size
    dense = touched = routed = 0.0
    for layer, count in self.shape.counted(self.start, self.end):
      dense += count * layer.weights_on(self.ways)
      if layer.num_experts:
        chosen = self.experts_touched(layer.num_experts, layer.per_token, m)
        touched += count * chosen * layer.expert
        routed += count * layer.per_token * layer.expert
    terms = [("weights", dense, dense)]
    if routed:
      terms.append(("experts", touched / self.ways, routed / self.ways))
    if self.head:
      head = self.shape.embedding / self.ways
      terms.append(("projection", head, head))
    return [Term(name, size * read, 2 * m * used) for name, read, used in terms]

  def _attention(self, rows, tokens, context, committed) -> list[Term]:
    """Counts KV read and written, and the FLOPs of attention.

    What recurrent layers keep for a row is read in every pass, but for inputs
    of convolutions, and all of it read and written when slots enter the state.
    Of a pass of more tokens than num_nodes they keep nothing.
    """
    read = written = flops = 0.0
    for layer, count in self.shape.counted(self.start, self.end):
      seen = layer.window.cached(context) if layer.window else context
      read += count * rows * self._position_bytes(layer, seen)
      keeps = not layer.num_nodes or tokens <= layer.num_nodes
      if keeps:
        written += count * rows * tokens * self._slot_bytes(layer)
      # Scores are computed among all tokens of the pass, masked or not.
      scores = (seen + tokens) * layer.score
      scores += self.source * layer.source_score
      flops += 2 * count * rows * tokens * scores / self.ways
      kept, always = (count * rows * x for x in self._state_bytes(layer))
      folds = folds_of(layer.slack, tokens, committed) if keeps else 0.0
      read += always + kept * folds
      written += kept * folds
      # Twice a multiply-add for each value of four bytes.
      flops += always * tokens
    return [
      Term("KV read", bytes=read, flops=flops),
      Term("KV written", bytes=written),
    ]

  def _collectives(self, m: float) -> Term:
    """Counts all-reduces: activations after every sublayer and the embedding.

    Logits stay sharded; sampling exchanges a few values per token.
    """
    size = BYTES["bfloat16" if self.weights != "float32" else "float32"]
    layers = self.shape.layers[self.start : self.end]
    times = sum(3 if layer.source_kv else 2 for layer in layers)
    times += self.start == 0
    draws = DRAW if self.head else 0
    size *= m * self.shape.width
    return self.all_reduces((times, size), (draws, 4 * m))

  def all_reduces(self, *exchanges: tuple[float, float]) -> Term:
    """Prices all-reduces among the chips that split the weights.

    Args:
      exchanges: (how many, bytes of each).
    """
    sent = seconds = 0.0
    for times, size in exchanges:
      one = chips.all_reduce(self.chip, self.ways, size)
      sent, seconds = sent + times * one.size, seconds + times * one.seconds
    return Term("collectives", sent=sent, seconds=seconds)

  def timed(self, m: float, parts: list[Term], layers: float) -> Cost:
    """Prices a pass of m tokens over all rows from its terms.

    Args:
      parts: per chip. "weights", "experts" and "projection" are products,
        "KV read" and "KV written" attention; these and "logits" get their
        seconds here, other terms bring theirs.
      layers: of the pass, for its overhead.
    """
    chip, efficiency = self.chip, self.efficiency
    overhead = efficiency.overhead + layers * efficiency.layer_overhead
    parts = [*parts, Term("overhead", seconds=overhead)]
    scores = self.score_type if self.score_type in chip.flops else "bfloat16"
    kinds = self.dtype, scores
    peak, kv_peak = (efficiency.flops * chip.rate(kind) for kind in kinds)
    products = ("weights", "experts", "projection")
    read = sum(term.bytes for term in parts if term.name in products)
    fast = chip.read_bandwidth(read)
    share = efficiency.one if m <= 1 else efficiency.weights
    factor = efficiency.factor(m)
    slowdown = factor * (max(m, chip.rows) / m)
    # Terms of a group overlap: group, B/s, factor on FLOPs, FLOP/s.
    product = "products", share * fast / factor, slowdown, peak
    attention = "attention", efficiency.kv * chip.bandwidth, 1.0, kv_peak
    rates = dict.fromkeys(products, product)
    rates |= {"KV read": attention, "KV written": attention}
    rates["logits"] = "logits", chip.bandwidth, 1.0, kv_peak
    timed, seconds = [], 0.0
    groups = collections.defaultdict(lambda: [0.0, 0.0])
    for term in parts:
      if term.name in rates:
        group, rate, slower, fastest = rates[term.name]
        moving, computing = term.bytes / rate, slower * term.flops / fastest
        groups[group][0] += moving
        groups[group][1] += computing
        alone = efficiency.combined(moving, computing)
        term = term._replace(seconds=alone)
      else:
        seconds += term.seconds
      timed.append(term)
    seconds += sum(efficiency.combined(*pair) for pair in groups.values())
    # An efficiency above 1 (weights that stay in cache) may beat bandwidth.
    least = min(seconds, sum(term.bytes for term in parts) / fast)
    return Cost(tuple(timed), seconds, least)


def experts_touched(
  count: int, per_token: int, tokens: float, correlation: float
) -> float:
  """Returns how many of `count` experts some of the tokens choose.

  Args:
    correlation: r of E (1 - (1 - k/E)^(m^r)); 1: tokens choose independently.
  """
  return count * (1 - (1 - per_token / count) ** (tokens**correlation))


def folds_of(slack: int, tokens: float, committed: float) -> float:
  """Returns how often a row's slots enter the state of a recurrent layer, as a
  share of passes of so many tokens that commit so many each.

  Args:
    slack: of Recurrence; 0: they never do.
  """
  if not slack or not committed:
    return 0.0
  return 1 / (max(slack - tokens, 0) // committed + 1)


class PassBound(NamedTuple):
  """What any implementation of a pass moves and computes at least."""

  bytes: int
  flops: int


def pass_bound(
  config: TransformerConfig, batch: int, tokens: int, context: int
) -> PassBound:
  """Returns lower bounds of a pass on one device.

  Bytes over a measured bandwidth are a time that no pass can beat. Counts the
  weights once (the experts that one token needs; of an untied embedding one
  row), the KV of the context within windows, and the KV of the tokens. Leaves
  out logits, and attention among the tokens of the pass beyond themselves.

  Args:
    batch: rows.
    tokens: per row.
    context: committed positions per row.
  """
  dtype = "float32" if config.dtype == "float32" else "bfloat16"
  shape = shapes.of_config(config)
  if r := config.recurrence:
    # Of the slots a pass may need few.
    least = {"state": 4 * r.state_size, "state_keys": 0, "slack": 0}
    least |= {"inputs": 0, "input_keys": 0}
    layers = (x._replace(**least) if x.state else x for x in shape.layers)
    shape = dataclasses.replace(shape, layers=tuple(layers))
  deployment = Deployment(
    shape,
    chips.get("v5e"),  # counts do not depend on the chip
    weights=dtype,
    kv=dtype,
    compute="bfloat16",
    correlation=0.0,
  )
  terms = deployment.cost(batch, tokens, context).terms
  moved = sum(term.bytes for term in terms if term.name != "logits")
  norm_and_row = config.width * (1 if config.tied else 2)
  flops = deployment.cost(batch * tokens, 1, context).flops
  return PassBound(round(moved + BYTES[dtype] * norm_and_row), round(flops))
