"""Self-drafts at long contexts: speedups, measured and predicted."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.benchmark import abstract
from specdec.benchmark.setup import Setup
from specdec.models.config import TransformerConfig
from specdec.report import at_rate
from specdec.report.tables import markdown
from specdec.roofline import chips, shapes
from specdec.roofline.cost import BYTES, Deployment, Efficiency
from specdec.roofline.round_cost import round_cost
from specdec.types import DrafterCost

_STEP = 2 ** (1 / 16)  # of contexts, in looking for where drafters cross


@functools.cache
def _parts(
  target: str, drafter: str, k: int, kv: str | None
) -> tuple[TransformerConfig, DrafterCost]:
  setup = Setup(target, drafter, k=k, kv=kv, random_weights=True)
  shapes_alone = abstract.target(setup)
  cost = abstract.drafter(setup, shapes_alone).drafter.cost
  return shapes_alone.checkpoint.config, cost


def long_contexts(documents: Mapping, *names: str) -> str:
  """Returns a row a context: measured / predicted speedup of each drafter, then
  from where on one drafts faster than another, by prediction.

  Speedups are at the rate of synthetic acceptance.

  Drafting is priced by round_cost, with the rates at which passes of one token
  read weights and KV; verification takes what a pass of its size took.

  Args:
    names: documents of bench.py, each of one drafter and one context; of one
      target and one type of its cache.
  """
  points = [documents[name] for name in names]
  settings = [point["settings"] for point in points]
  places = [(x["context"], x["drafter"]) for x in settings]
  target, kv = settings[0]["target"], settings[0].get("kv")
  k = points[0]["runs"][0]["k"]
  passes = [
    {x["tokens"]: x["seconds"]["median"] for x in document["passes"]}
    for document in points
  ]
  config, _ = _parts(target, places[0][1], k, kv)
  ones = [one[1] for one in passes]
  deployment = _fitted(config, [context for context, _ in places], ones)

  def drafting(drafter: str, context: float) -> float:
    _, cost = _parts(target, drafter, k, kv)
    return round_cost(deployment, cost, k, 1, context).only("draft").seconds

  cells = {}
  for place, document, seconds in zip(places, points, passes):
    context, drafter = place
    [run] = document["runs"]
    speed = run["speed"]
    baseline = speed["baseline_seconds"] / speed["baseline_tokens"]
    overhead = max(0.0, baseline - seconds[1])
    whole = drafting(drafter, context) + seconds[run["nodes"]] + overhead
    tokens = at_rate.tokens_of(document["settings"], k)
    measured = at_rate.speedup(run, tokens)
    cells[place] = f"{measured} / {tokens * baseline / whole:.2f}"
  drafters = list(dict.fromkeys(drafter for _, drafter in places))
  columns = {"context": "{:,}"} | {
    f"`{drafter}`": lambda context, name=drafter: cells[context, name]
    for drafter in drafters
  }
  rows = sorted({context for context, _ in places})
  lines = [
    _crossing(*pair, drafting) for pair in itertools.combinations(drafters, 2)
  ]
  return "\n".join([markdown(rows, columns), "", *lines])


def _fitted(
  config: TransformerConfig, contexts: Sequence[int], seconds: Sequence[float]
) -> Deployment:
  """Returns a target on a chip that reads weights and KV as fast as passes of
  one token did, and computes for free."""
  a_position, fixed = np.polyfit(contexts, seconds, 1)
  shape = shapes.of_config(config)
  size = BYTES[config.dtype]
  weights = size * shape.num_parameters / fixed
  kv = BYTES[config.kv or config.dtype] * shape.cached / a_position / weights
  free = {"float32": math.inf, "bfloat16": math.inf}
  chip = chips.get("v5e", bandwidth=weights, rows=1, **free)
  fit = Efficiency(kv=kv)
  return Deployment(shape, chip, config.dtype, config.dtype, efficiency=fit)


def _crossing(one: str, other: str, drafting) -> str:
  """Says from which context on one drafts faster than the other."""

  def is_slower(context: float) -> bool:
    return drafting(one, context) > drafting(other, context)

  context = 2.0**20
  at_last = is_slower(context)
  while context > 16 and is_slower(context) == at_last:
    context /= _STEP
  fast, slow = (other, one) if at_last else (one, other)
  where = "at every context"
  if context > 16:
    where = f"from about {float(f'{context:.2g}'):,.0f} positions on"
  return f"- `{fast}` drafts faster than `{slow}` {where}, by prediction"
