"""Drafters of one target side by side: measured, and predicted by bytes.

Invariant: all decode the same prompts by the same rule, each in turns with the
autoregressive baseline; a prediction takes the tokens per target step that were
measured, and no time of the drafter.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from specdec import draft_tree
from specdec.benchmark.comparison import Point, Shape
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.models.config import TransformerConfig
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.types import DrafterCost

TEMPERATURES = (0.0, 1.0)
# How often a node's first, second ... child is accepted: shapes the tree.
_RANKS = (0.6, 0.14, 0.07)
_DEEPEST = 8  # levels of the tree


def keyed(
  points: Sequence[Point], weights: Mapping[str, int]
) -> dict[tuple, Point]:
  """Returns points by what a line is recognised by.

  A drafter that was trained anew, or whose files were edited, is measured anew.

  Args:
    weights: checksum of each drafter's weights.
  """
  whole = {}
  for setup, shape in points:
    checksum, files = weights[setup.drafter], setup.checksums()
    if files:
      checksum = zlib.crc32(repr(sorted(files.items())).encode(), checksum)
    key = setup.drafter, setup.temperature, shape.name, shape.size, checksum
    whole[key] = Point(setup, shape)
  return whole


def _fits(setup: Setup, target: Target, shape: Shape) -> bool:
  """Whether the drafter can draw that shape, right for the rule."""
  try:
    for temperature in TEMPERATURES:
      whole = dataclasses.replace(setup, temperature=temperature)
      whole = shape.setup(whole)
    decoder = whole.decoder(target)
  except ValueError:
    return False
  whole.check_memory(target, decoder)
  return True


def _tree(size: int, depth: int) -> Shape:
  by_depth = np.tile(_RANKS, (depth, 1))
  levels = max(map(len, draft_tree.optimal(by_depth, size)))
  call = f"optimal({size}, {list(_RANKS)})"
  return Shape(size, "tree", "", call, levels)


def points_of(
  setups: Sequence[Setup], target: Target, ks: Sequence[int], tree_size: int
) -> list[Point]:
  """Returns what each drafter is measured with, at each temperature.

  Chains of every k, and one tree, the same for all drafters that draw trees: as
  deep as all of these can, at most the largest k. What a drafter refuses is
  left out: a k that it has no heads for, a tree.

  Args:
    setups: each drafter's, with a chain.
    tree_size: draft tokens of the tree; 0: none.
  """
  chains = [Shape(k, "chain", "none", "chain", k) for k in ks]
  drawn = [[x for x in chains if _fits(one, target, x)] for one in setups]
  if tree_size:
    flat = _tree(tree_size, 1)
    able = [_fits(one, target, flat) for one in setups]
    for depth in range(min(max(ks), _DEEPEST), 0, -1):
      tree = _tree(tree_size, depth)
      if all(_fits(x, target, tree) for x in itertools.compress(setups, able)):
        break
    for shapes_of_one in itertools.compress(drawn, able):
      shapes_of_one.append(tree)
  return [
    Point(dataclasses.replace(setup, temperature=temperature), shape)
    for temperature in TEMPERATURES
    for setup, some in zip(setups, drawn)
    for shape in some
  ]


class Machine:
  """Predicts rounds: reads at the rate of a one-token pass, computes for free.

  Attributes:
    read_rate: bytes per second of a one-token pass of the target.
  """

  def __init__(
    self,
    config: TransformerConfig,
    passes: Mapping[int, float],
    batch: int,
    context: int,
  ):
    """Takes the target's config, and what `comparison.time_passes` returned."""
    free = {"float32": math.inf, "bfloat16": math.inf}
    chip = chips.get("v5e", bandwidth=1.0, rows=1, **free)
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    self._target = Deployment(shapes.of_config(config), chip, dtype, dtype)
    self._passes, self._place = passes, (batch, context)
    self.read_rate = self._target.cost(batch, 1, context).bytes / passes[1]

  def seconds(
    self, cost: DrafterCost, draft, nodes: int, baseline: float
  ) -> float:
    """Predicts a round.

    Drafting takes what its bytes take; verification what a pass of so many
    tokens took, less the layers that an early exit has run; the rest what an
    autoregressive round takes beyond its pass.

    Args:
      draft: what the drafter drafts, as `round_cost` takes it.
      nodes: verified; a drafter ahead of it may have drafted more.
      baseline: seconds of an autoregressive round.
    """
    batch, context = self._place
    estimated = round_cost(self._target, cost, draft, batch, context)
    verify = estimated.only("target").seconds
    drafted = draft if isinstance(draft, int) else sum(draft)
    whole = self._target.cost(batch, 1 + drafted, context).seconds
    verified = self._passes[nodes] * verify / whole
    overhead = max(0.0, baseline - self._passes[1])
    drafting = (estimated.seconds - verify) / self.read_rate
    return drafting + verified + overhead

  def step_bytes(self, cost: DrafterCost) -> float:
    """Returns the bytes that one more draft token of a chain moves."""
    one, two = (
      round_cost(self._target, cost, k, *self._place).only("draft").bytes
      for k in (1, 2)
    )
    return two - one


def document(
  point: Point, line: dict, decoder: Decoder, machine: Machine
) -> dict:
  """Returns a point that was measured, its line, as results.json has it."""
  cost, step_bytes, predicted = decoder.drafter.cost, None, None
  if cost is not None and cost.step is not None:
    step_bytes = machine.step_bytes(cost)
    predicted = _speedup(point, line["run"], cost, machine)
  weights = jax.tree.leaves(decoder.params.draft)
  drafter = {
    "name": point.setup.drafter,
    "kind": decoder.drafter.name,
    "temperature": point.setup.temperature,
    "weights": sum(x.size for x in weights),  # beyond the target's
    "step_bytes": step_bytes,
    "shape": point.shape.name,
    "seconds": line["round_seconds"],
    "load": line["load"],
  }
  return line["run"] | {"drafter": drafter, "predicted": predicted}


def _speedup(
  point: Point, run: dict, cost: DrafterCost, machine: Machine
) -> float:
  """Predicts the speedup for the tokens per step that were measured."""
  draft, speed = run["k"], run["speed"]
  if point.shape.name == "tree":
    spec = point.shape.setup(point.setup).make_shape().spec
    _, *levels = draft_tree.levels(np.array(spec.parents))
    draft = tuple(level.stop - level.start for level in levels)
  baseline = speed["baseline_seconds"] * run["batch"] / speed["baseline_tokens"]
  seconds = machine.seconds(cost, draft, run["nodes"], baseline)
  tokens = run["acceptance"]["tokens_per_pass"]["value"]
  return tokens * baseline / seconds
