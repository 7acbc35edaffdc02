"""Acceptance rules and draft shapes side by side, at equal target tokens.

Invariant: what is expected of the rules of one shape is expected of the very
same drafts; what is measured is each rule's own text, timed in turns with
autoregressive decoding.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from specdec import decode, draft_tree
from specdec.benchmark import (
  expected_acceptance,
  metrics,
  provenance,
  runs,
  timing,
)
from specdec.benchmark.batches import batches_of
from specdec.benchmark.catalog import Target
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.noise import pilot_key
from specdec.roofline import trees
from specdec.testing import tabular
from specdec.types import AcceptanceRule
from specdec.utils import files, terminal

RULES = (
  "rejection", "block", "traversal", "multipath", "kseq", "coupled", "naive",
  "lenience", "fly", "typical", "relaxed",
)  # fmt: skip
USUAL_SHAPES = (
  "chain", "2 chains", "4 chains", "optimal tree", "dynamic tree",
)  # fmt: skip
SHAPES = (*USUAL_SHAPES, "wide tree")
RANKED = ("without_replacement", "deterministic")  # siblings of static trees
_DEPTH = 16  # levels whose acceptance is measured, at most
# What decides on a target's baseline.
_BASELINE = (
  "batch", "prompt_size", "max_new_tokens", "temperature", "top_k", "top_p",
)  # fmt: skip


class Shape(NamedTuple):
  """Drafts of one kind, and the rules that are right for them."""

  size: int
  name: str
  siblings: str
  call: str  # for Setup.shape
  levels: int
  rules: tuple[str, ...] = ()  # calls, for Setup.acceptance

  def setup(self, setup: Setup, rule: str | None = None) -> Setup:
    """Returns the setup with drafts of this shape, and that rule."""
    rule = rule or setup.acceptance
    return dataclasses.replace(
      setup, shape=self.call, k=self.levels, acceptance=rule
    )

  def drawn(self, setup: Setup) -> str:
    """Returns how siblings are drawn: a tree that is a chain has none."""
    return self.setup(setup).make_shape().spec.siblings


class Point(NamedTuple):
  """What is measured by itself: a setup but for the shape, and the shape."""

  setup: Setup
  shape: Shape


class Bench:
  """Times ways of decoding the same prompts; see Decoder.for_timing."""

  def __init__(
    self, target: Target, encoded: Sequence[Sequence[int]], pilots: bool = False
  ):
    """Args:
    encoded: prompts.
    pilots: what is measured decides how others decode, so it draws noise of its
      own (rule 7).
    """
    self.target, self.encoded, self._pilots = target, encoded, pilots
    self._baselines: dict[tuple, Decoder] = {}

  def decoder(self, setup: Setup) -> Decoder:
    """Builds the decoder of a setup, and checks that it fits."""
    decoder = setup.decoder(self.target)
    setup.check_memory(self.target, decoder)
    if self._pilots:
      decoder = dataclasses.replace(decoder, key=pilot_key(decoder.key))
    return decoder.for_timing()

  def ways(
    self,
    setup: Setup,
    rows: Sequence[Sequence[int]],
    what: str,
    baseline: bool = True,
  ) -> dict[str, Decoder]:
    """Returns a setup's decoder, and its baseline, compiled and run."""
    decoder = self.decoder(setup)
    ways = {runs.OURS: decoder}
    if baseline:
      place = tuple(getattr(setup, name) for name in _BASELINE)
      ways[runs.BASELINE] = self._baselines.setdefault(
        place, decoder.baseline()
      )
    with terminal.progress(f"compiling {what}"):
      for way in ways.values():
        way.is_warm = False  # programs of a baseline may be forgotten
        way.warm_up(rows)
    return ways

  def measure(self, point: Point) -> dict:
    """Decodes every prompt, in turns with the baseline; returns a line's
    document of the run and seconds of a round."""
    setup, shape = point
    timing.forget_programs()  # of the point before
    batches = batches_of(self.encoded, setup.batch)
    what = f"{shape.name} of {shape.size}, {setup.acceptance}"
    ways = self.ways(shape.setup(setup), batches[0].rows, what)
    comparison = runs.compare(ways, batches)
    run = comparison.run(runs.OURS, shape.levels)
    rounds = sum(one.num_rounds for one in comparison.of(runs.OURS))
    seconds = run.speed.seconds / rounds
    return {"run": run.document(), "round_seconds": seconds}


def resume(
  lines: files.Lines,
  points: Mapping[tuple, Any],
  measure: Callable[[Any], dict],
  unit: str,
) -> list[dict]:
  """Returns a line for every point, by what a line is recognised by; those that
  `lines` does not hold are measured, and kept there."""
  kept = [x for x in lines.entries if isinstance(x.get("point"), list)]
  done = {tuple(x["point"]): x for x in kept}
  with tqdm(points.items(), unit=unit) as progress:
    for key, point in progress:
      if key not in done:
        name = ", ".join(map(str, key[:4]))
        progress.set_postfix_str(terminal.escape(name, ""))
        done[key] = {"point": key, **measure(point), "load": provenance.load()}
        lines.append(done[key])
  return [done[key] for key in points]


def with_rule(setup: Setup, call: str) -> Setup:
  """Returns a setup that has the rule which a call names, and no drafter.

  Raises:
    ValueError: there is no such rule, or its arguments are wrong.
  """
  return dataclasses.replace(
    setup, drafter="none", shape="chain", acceptance=call
  )


def rule_of(setup: Setup, call: str) -> AcceptanceRule:
  """Builds the rule that a call names; raises as `with_rule`."""
  return with_rule(setup, call).make_rule()


def shapes_of(
  setup: Setup, size: int, acceptance: dict[str, Sequence], rules: Sequence[str]
) -> list[Shape]:
  """Returns all shapes of `size` draft tokens with the rules right for each.

  Leaves out shapes that the setup's drafter cannot draw, and trees that the
  acceptance makes smaller (deeper children are never accepted).

  Args:
    acceptance: by kind of siblings, how often a node's r-th child is accepted,
      or by depth and rank.
    rules: calls.
  """
  candidates = [Shape(size, "chain", "none", "chain", size)]
  for count, siblings in itertools.product((2, 4), ("iid", RANKED[0])):
    if size % count == 0:
      call = f"chains({count}, siblings={siblings})"
      name = f"{count} chains"
      candidates.append(Shape(size, name, siblings, call, size // count))
  levels = 1
  for siblings, rates in acceptance.items():
    paths = draft_tree.optimal(rates, size)
    if len(paths) == size:
      call = f"optimal({size}, {list(rates)}, siblings={siblings})"
      depth = len(paths[-1])
      candidates.append(Shape(size, "optimal tree", siblings, call, depth))
      levels = max(levels, depth)
  # As deep as those, and so wide that there are enough draft tokens to choose
  # from; less deep where a drafter has room for the tree's own nodes alone.
  top = min(4, size)
  least = 1 + max(0, -(-(size - top) // top**2))
  call = f"dynamic({size}, top={top})"
  for depth in range(max(levels, least), 0, -1):
    tree = Shape(size, "dynamic tree", "deterministic", call, depth)
    if depth == least or any(_fits(setup, tree, rule) for rule in rules):
      candidates.append(tree)
      break
  # Bounded by nothing but its size: of one pass, DDTree's (arXiv:2604.12989).
  call = f"dynamic({size}, top={size})"
  candidates.append(Shape(size, "wide tree", "deterministic", call, size))
  shapes = [
    shape._replace(rules=tuple(r for r in rules if _fits(setup, shape, r)))
    for shape in candidates
  ]
  return [shape for shape in shapes if shape.rules]


def _fits(setup: Setup, shape: Shape, rule: str) -> bool:
  """Whether the rule is right for drafts that the drafter can draw."""
  if shape.call != "chain" and rule_of(setup, rule).chains_only:
    return False  # a small tree may be a chain, which is there already
  try:
    whole = shape.setup(setup, rule)
    decode.check_pair(whole.make_shape().spec, whole.make_rule())
  except ValueError:
    return False
  return True


def check_drafter(setup: Setup) -> None:
  """Refuses drafters of chains, whose acceptance by rank cannot be measured."""
  try:
    for siblings in RANKED:
      _comb(siblings, 1).setup(setup, "rejection")
  except ValueError as error:
    raise ValueError(
      f"drafter = {setup.drafter}: {error}; trees are compared as well, so "
      "take a drafter that can draw them"
    ) from error


def _comb(siblings: str, depth: int) -> Shape:
  """The shape whose acceptance is measured."""
  return Shape(depth, "comb", siblings, f"comb(siblings={siblings})", depth)


def measure_acceptance(
  bench: Bench, setup: Setup, depth: int, lines: files.Lines
) -> dict[str, list[list[float]]]:
  """Returns [D, R], by kind of siblings, how often a node's r-th child is kept.

  It is measured where `lines` does not hold it, and kept there. As a tree is
  built from it, the noise is of its own (rule 7).

  Args:
    depth: levels of the deepest tree; at most 16 are measured.
  """
  for line in lines.entries:
    if "by_depth" in line:
      return line["by_depth"]
  measured, depth = {}, min(depth, _DEPTH)
  most = bench.target.model.max_tokens  # of recurrent layers
  if most is not None:
    depth = min(depth, 1 + max(0, most - 9) // 4)
  for siblings in RANKED:
    shape = _comb(siblings, depth)
    decoder = bench.decoder(shape.setup(setup, "rejection"))
    decoder = dataclasses.replace(decoder, key=pilot_key(decoder.key))
    with terminal.progress(f"counting acceptance by depth, {siblings}"):
      shares = expected_acceptance.acceptance_by_depth(decoder, bench.encoded)
    # float32 may sum to 1 + 1e-7.
    shares /= np.maximum(1.0, shares.sum(1, keepdims=True))
    # Rounded down, so that they still do not sum to more than 1.
    measured[siblings] = (np.floor(1e6 * shares) / 1e6).tolist()
  lines.append({"by_depth": measured})
  return measured


def _expected(bench: Bench, setup: Setup, shape: Shape) -> dict[str, dict]:
  """Returns, by rule, the expected accepted tokens a round, and the tokens per
  target step over rejection's.

  Rejection writes the text, so a lossy rule is evaluated on text of the
  target's distribution.
  """
  timing.forget_programs()  # of the shape before
  decoder = bench.decoder(shape.setup(setup, "rejection"))
  rules = [rule_of(setup, rule) for rule in shape.rules]
  what = f"counting expected tokens, {shape.name} of {shape.size}"
  with terminal.progress(what):
    sums, rounds = expected_acceptance.expected_lengths(
      decoder, bench.encoded, [decoder.rule, *rules]
    )
  token, *sums = sums

  def estimate(over, under):
    return dataclasses.asdict(metrics.ratio(over, under))

  return {
    rule: {
      "expected": estimate(total, rounds),
      "gain": estimate(total + rounds, token + rounds),
    }
    for rule, total in zip(shape.rules, sums)
  }


def _known(value: float) -> float | None:
  """Returns None, which JSON has, in the place of nan."""
  return None if math.isnan(value) else value


def compare(
  bench: Bench, setup: Setup, shapes: Sequence[Shape], lines: files.Lines
) -> list[dict]:
  """Returns a run's document for every shape and each of its rules.

  Those that `lines` does not hold are measured, and kept there.
  """
  expected = functools.partial(_expected, bench, setup)
  expected = functools.lru_cache(maxsize=1)(expected)

  def measure(point: Point) -> dict:
    setup, shape = point
    worth, line = expected(shape)[setup.acceptance], bench.measure(point)
    rule = setup.make_rule()
    drawn = shape.drawn(setup)
    tables = tabular.on_tables(rule, drawn, setup.temperature)
    worth |= {"round_seconds": line["round_seconds"]}
    worth["comparison"] = {
      "rule": setup.acceptance,
      "shape": shape.name,
      "siblings": shape.siblings,
      "lossless": rule.lossless,
      "distance": _known(tables.distance),
      "accepted_on_tables": _known(tables.accepted),
      "optimum_on_tables": tables.optimum,
    }
    return {"run": line["run"] | worth}

  points = {
    (*shape[:3], rule): Point(
      dataclasses.replace(setup, acceptance=rule), shape
    )
    for shape in shapes
    for rule in shape.rules
  }
  documents = [x["run"] for x in resume(lines, points, measure, "rule")]
  timing.forget_programs()
  return documents


def time_passes(
  setup: Setup,
  target: Target,
  lines: files.Lines,
  nodes: Iterable[int],
  context: int,
) -> dict[int, float]:
  """Returns median seconds of passes of the target over 1 and these numbers of
  tokens a row; what `lines` does not hold is timed, and kept there."""
  passes = dict(tuple(x["pass"]) for x in lines.entries if "pass" in x)
  params = target.checkpoint.params
  for n in sorted({1, *nodes} - set(passes)):
    slots = context + setup.max_new_tokens + n
    shape = setup.batch, n, context, slots
    timed = timing.pass_timer(target.model, params, *shape)
    passes[n] = float(np.median([timed() for _ in range(7)]))
    lines.append({"pass": (n, passes[n])})
  return passes


def best_tree(
  runs: Sequence[dict],
  acceptance: dict[str, Sequence],
  passes: dict[int, float],
  temperature: float,
) -> dict | None:
  """Searches the static tree that pays most by the times of these runs.

  Returns:
    Its paths and what is expected of it; None where no chain was decoded,
    which says what a level of drafting takes.
  """
  chains = [run for run in runs if run["comparison"]["shape"] == "chain"]
  if not chains:
    return None
  chain, speed = chains[0], chains[0]["speed"]
  baseline = speed["baseline_seconds"] / speed["baseline_tokens"]
  # What a baseline round takes beyond its pass (drawing, say) others take too.
  overhead = max(0.0, baseline * chain["batch"] - passes[1])
  times = {n: seconds + overhead for n, seconds in sorted(passes.items())}
  of_pass = float(np.interp(chain["nodes"], [*times], [*times.values()]))
  of_level = max(0.0, (chain["round_seconds"] - of_pass) / chain["k"])
  # A distribution without noise has but one token to draw.
  siblings = "without_replacement" if temperature else "deterministic"
  tree = trees.best(acceptance[siblings], times, of_level)
  return {
    "siblings": siblings,
    "pass_seconds": [*times.items()],
    "level_seconds": of_level,
    **tree._asdict(),
  }
