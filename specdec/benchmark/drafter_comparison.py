"""Drafters of one target side by side: measured, and predicted by bytes.

Invariant: all decode the same prompts by the same rule, each in turns with the
autoregressive baseline; a prediction takes the tokens per target step that were
measured, and no time of the drafter.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from specdec import draft_tree
from specdec.benchmark import provenance, timing
from specdec.benchmark.catalog import Target
from specdec.benchmark.comparison import RuleComparison, Shape
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.models.config import TransformerConfig
from specdec.roofline import shapes
from specdec.roofline.chips import Chip
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.types import DrafterCost
from specdec.utils import files

TEMPERATURES = (0.0, 1.0)
# How often a node's first, second ... child is accepted: shapes the tree.
_RANKS = (0.6, 0.14, 0.07)
_DEEPEST = 8  # levels of the tree


class Candidate(NamedTuple):
  """A drafter that is compared.

  Attributes:
    setup: it, with a chain of the smallest k.
    decoder: what that setup builds.
    checksum: of its weights: one that was trained anew is measured anew.
  """

  setup: Setup
  decoder: Decoder
  checksum: int

  @property
  def cost(self) -> DrafterCost | None:
    """What drafting reads; None: unknown."""
    cost = self.decoder.drafter.cost
    return cost if cost is not None and cost.step is not None else None

  @property
  def weights(self) -> int:
    """Weights held beyond the target's."""
    return sum(x.size for x in jax.tree.leaves(self.decoder.params.draft))


class Point(NamedTuple):
  """What is measured by itself."""

  candidate: Candidate
  temperature: float
  shape: Shape

  @property
  def setup(self) -> Setup:
    """Its setup, but for the shape."""
    return dataclasses.replace(
      self.candidate.setup, temperature=self.temperature
    )

  @property
  def key(self) -> tuple:
    """What a line is recognised by."""
    name, shape = self.candidate.setup.drafter, self.shape
    checksum = self.candidate.checksum
    return name, self.temperature, shape.name, shape.size, checksum


def _fits(setup: Setup, target: Target, shape: Shape) -> bool:
  """Whether the drafter can draw that shape, right for the rule."""
  setup = dataclasses.replace(setup, k=shape.levels)
  try:
    for temperature in TEMPERATURES:
      setup = dataclasses.replace(
        setup, shape=shape.call, temperature=temperature
      )
    decoder = setup.decoder(target)
  except ValueError:
    return False
  setup.check_memory(target, decoder)
  return True


def _tree(size: int, depth: int) -> Shape:
  by_depth = np.tile(_RANKS, (depth, 1))
  levels = max(map(len, draft_tree.optimal(by_depth, size)))
  call = f"optimal({size}, {list(_RANKS)})"
  return Shape(size, "tree", "", call, levels)


def points_of(
  candidates: Sequence[Candidate],
  target: Target,
  ks: Sequence[int],
  tree_size: int,
) -> list[Point]:
  """Returns what each drafter is measured with, at each temperature.

  Chains of every k, and one tree, the same for all drafters that draw trees: as
  deep as all of these can, at most the largest k. What a drafter refuses is
  left out: a k that it has no heads for, a tree.

  Args:
    tree_size: draft tokens of the tree; 0: none.
  """
  chains = [Shape(k, "chain", "none", "chain", k) for k in ks]
  drawn = [
    [shape for shape in chains if _fits(one.setup, target, shape)]
    for one in candidates
  ]
  if tree_size:
    flat = _tree(tree_size, 1)
    able = [_fits(one.setup, target, flat) for one in candidates]
    for depth in range(min(max(ks), _DEEPEST), 0, -1):
      tree = _tree(tree_size, depth)
      if all(
        _fits(one.setup, target, tree)
        for one in itertools.compress(candidates, able)
      ):
        break
    for shapes_of_one in itertools.compress(drawn, able):
      shapes_of_one.append(tree)
  return [
    Point(candidate, temperature, shape)
    for temperature in TEMPERATURES
    for candidate, some in zip(candidates, drawn)
    for shape in some
  ]


def measure(
  points: Sequence[Point],
  target: Target,
  encoded: Sequence[Sequence[int]],
  lines: files.Lines,
) -> list[dict]:
  """Returns a line for every point.

  Those that `lines` does not hold are measured, and kept there.
  """
  done = {tuple(x["point"]): x for x in lines.entries if "point" in x}
  for point in tqdm(points, unit="point"):
    if point.key in done:
      continue
    bench = RuleComparison(point.setup, target, encoded)
    run, seconds = bench.measured(point.shape, point.setup.acceptance)
    done[point.key] = {
      "point": point.key,
      "run": run.document(),
      "round_seconds": seconds,
      "load": provenance.load(),
    }
    lines.append(done[point.key])
    timing.forget_programs()
  return [done[point.key] for point in points]


class Machine(NamedTuple):
  """What a drafter's rounds are predicted from."""

  target: Deployment  # reads at the rate of a one-token pass, computes for free
  passes: Mapping[int, float]  # measured seconds by tokens of a row
  batch: int
  context: int

  @property
  def read_rate(self) -> float:
    """Bytes per second of a one-token pass of the target."""
    return self.target.chip.bandwidth

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
    where = self.batch, self.context
    priced = round_cost(self.target, cost, draft, *where)
    verify = priced.only("target").seconds
    drafted = draft if isinstance(draft, int) else sum(draft)
    whole = self.target.cost(self.batch, 1 + drafted, self.context).seconds
    overhead = max(0.0, baseline - self.passes[1])
    verified = self.passes[nodes] * verify / whole
    return priced.seconds - verify + verified + overhead

  def step_bytes(self, cost: DrafterCost) -> float:
    """Returns the bytes that one more draft token of a chain moves."""
    one, two = (
      round_cost(self.target, cost, k, self.batch, self.context)
      .only("draft")
      .bytes
      for k in (1, 2)
    )
    return two - one


def machine(
  config: TransformerConfig,
  passes: Mapping[int, float],
  batch: int,
  context: int,
) -> Machine:
  """Returns a machine that reads as a one-token pass was seen to.

  Args:
    passes: of `comparison.time_passes`.
  """

  def deploy(bandwidth: float) -> Deployment:
    chip = Chip(
      "this machine",
      memory=math.inf,
      bandwidth=bandwidth,
      flops={"float32": math.inf, "bfloat16": math.inf},
      link_bandwidth=bandwidth,
      axes=0,
      wrap=1,
      hop_seconds=0.0,
      rows=1,
      source="a pass of one token",
    )
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    return Deployment(shapes.of_config(config), chip, dtype, dtype)

  size = deploy(1.0).cost(batch, 1, context).bytes
  return Machine(deploy(size / passes[1]), passes, batch, context)


def documents(
  points: Sequence[Point], lines: Sequence[dict], machine: Machine
) -> list[dict]:
  """Returns every point as results.json has it.

  Args:
    lines: of `measure`.
  """
  return [
    line["run"]
    | {
      "drafter": {
        "name": point.candidate.setup.drafter,
        "kind": point.candidate.decoder.drafter.name,
        "temperature": point.temperature,
        "weights": point.candidate.weights,
        "step_bytes": point.candidate.cost
        and machine.step_bytes(point.candidate.cost),
        "shape": point.shape.name,
        "seconds": line["round_seconds"],
        "load": line["load"],
      },
      "predicted": _speedup(point, line["run"], machine),
    }
    for point, line in zip(points, lines)
  ]


def _speedup(point: Point, run: dict, machine: Machine) -> float | None:
  """Predicts the speedup for the tokens per step measured; None: unknown."""
  cost, speed = point.candidate.cost, run["speed"]
  if cost is None:
    return None
  draft = run["k"]
  if point.shape.name == "tree":
    setup = point.shape.setup(point.setup, point.setup.acceptance)
    _, *levels = draft_tree.levels(np.array(setup.make_shape().spec.parents))
    draft = tuple(level.stop - level.start for level in levels)
  baseline = speed["baseline_seconds"] * run["batch"] / speed["baseline_tokens"]
  seconds = machine.seconds(cost, draft, run["nodes"], baseline)
  tokens = run["acceptance"]["tokens_per_pass"]["value"]
  return tokens * baseline / seconds
