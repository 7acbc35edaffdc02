"""Lists the measurements that docs/results shows: programs with their flags.

To add one, add it to the module of its kind, and a region to a page that shows
it.
"""

from collections.abc import Iterable

from specdec.benchmark.measurements import drafters, predictions, rules, speeds
from specdec.benchmark.measurements.measurement import Measurement
from specdec.utils.spelling import choices

FOUR_KINDS = "configs/prompts/four_kinds.jsonl"  # {prompts} of whole runs
# In the order of a whole run: some read what others wrote.
MEASUREMENTS = (
  *speeds.passes(),
  *speeds.weights(),
  *drafters.COMPARED,
  *drafters.equal_trees(),
  *drafters.long(),
  *drafters.summary(),
  *rules.RULES,
  *drafters.smollm2(),
  *speeds.lengths(),
  *speeds.beams(),
  *speeds.mixtures(),
  *speeds.goodput(),
  *predictions.PREDICTIONS,
  *predictions.heads(),
  *predictions.slices(),
  *predictions.training(),
)


def named(names: Iterable[str]) -> list[Measurement]:
  """Returns those of these names, in their usual order; refuses others."""
  valid = [one.name for one in MEASUREMENTS]
  wanted = set(names)
  for name in wanted.difference(valid):
    raise ValueError(f"no measurement is named {name}; {choices(name, valid)}")
  return [one for one in MEASUREMENTS if one.name in wanted]
