"""Numbers of the cost model that no refactor may change, to twelve digits.

(Python 3.12 sums floats more exactly than 3.11.)

Rounds of pairs on chips, what planning makes of them, and the papers' tables.
They stand in fixtures/golden/costs.json, written on version 0.1.0; those of
meshes anew since norms, routers and shared KV heads count on every chip.

  python tests/golden_costs.py            # compares; says what differs
  python tests/golden_costs.py --write    # after a change that is meant
"""

import json
import pathlib
import sys

from specdec.report import papers
from specdec.roofline import chips, drafter_cost, planning, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import Overhead, TargetDraftPair
from specdec.types import DrafterCost

FILE = pathlib.Path(__file__).parent / "fixtures" / "golden" / "costs.json"
PREFIX_ACCEPTANCE = (0.8, 0.66, 0.55, 0.47, 0.4, 0.34)


def pairs() -> dict[str, TargetDraftPair]:
  """Deployments of every kind of draft, of dense models and experts."""

  def deployment(name, chip, **options):
    return Deployment(shapes.get(name), chips.get(chip), **options)

  large = deployment("llama3-70b", "v6e", ways=8)
  early = deployment("llama3-8b", "h100")
  experts = deployment("mixtral-8x7b", "v5p", ways=4, replicas=2)
  quantised = deployment("llama3-8b", "v5e", ways=2, weights="int8", kv="int8")
  tenth = drafter_cost.model(shapes.scaled(large.shape, 0.1))
  late = Overhead(((1, 1e-4, 2e-5), (64, 3e-4, 5e-5)))
  return {
    "70B with 1B": TargetDraftPair(
      large, drafter_cost.model(shapes.get("llama3-1b"))
    ),
    "70B with a tenth": TargetDraftPair(large, tenth),
    "8B, exit after 8": TargetDraftPair(early, DrafterCost(exit_layer=8)),
    "8B, copies": TargetDraftPair(early),
    "experts": TargetDraftPair(experts),
    "int8, with overhead": TargetDraftPair(
      quantised, overhead=late, baseline_overhead=late
    ),
  }


def numbers() -> dict[str, object]:
  """Every number, by a name."""
  values = {}
  for name, pair in pairs().items():
    for batch in (1, 8, 64):
      for context in (128, 8192):
        where = f"{name}; batch {batch}; context {context}"
        for k in (0, 1, 4, 8):
          cost = pair.round(batch, k, context)
          values[f"{where}; k = {k}"] = [cost.seconds, cost.overhead]
        tree = pair.round(batch, (3, 4, 4), context)
        values[f"{where}; tree"] = tree.seconds
        best = planning.best_k(pair, batch, context, PREFIX_ACCEPTANCE)
        values[f"{where}; best k"] = [best.k, best.speedup, best.tokens]
        memory = pair.memory(batch, context)
        values[f"{where}; memory"] = list(memory.values())
    plans = {
      "break-even batch": planning.break_even_batch(pair, 1024, 0.7),
      "largest batch": planning.largest_batch(pair, 4096),
      "equal memory": planning.at_equal_memory(pair, 512, 0.8),
      "schedule": planning.schedule(pair, 1024, PREFIX_ACCEPTANCE),
      "tree": planning.best_tree(pair, 1, 1024, (0.7, 0.1, 0.05), 16),
    }
    values |= {f"{name}; {plan}": value for plan, value in plans.items()}
  for name in ("LEVIATHAN_1", "LEVIATHAN_2", "CHEN", "SCALING_BOOK"):
    rows = getattr(papers, name)
    values[f"papers; {name}"] = [row.ours() for row in rows]
  return json.loads(
    json.dumps(values), parse_float=lambda text: float(f"{float(text):.12g}")
  )


def compare(file: pathlib.Path, values: dict) -> None:
  """Prints what differs from a golden file; writes it with --write."""
  print(f"{len(values)} entries")
  if "--write" in sys.argv:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return
  golden = json.loads(file.read_text())
  for key in sorted(golden.keys() | values.keys()):
    if golden.get(key) != values.get(key):
      print("differs:", key, golden.get(key), values.get(key))


if __name__ == "__main__":
  compare(FILE, numbers())
