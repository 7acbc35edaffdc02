"""Lists measurements of acceptance rules, and of the shapes of their drafts."""

from specdec.benchmark.measurements.measurement import (
  HELD_OUT,
  PAIR,
  Measurement,
)

_RULES = f"{HELD_OUT} {PAIR} --limit=8 --max_new_tokens=96"
_TREES = "--shapes='chain,optimal tree,dynamic tree' --sizes=4,8,16,24"
_RULES_QUICK = "--limit=1 --max_new_tokens=16 --sizes=4"
RULES = (
  Measurement(
    "rules",
    f"compare_rules {_RULES} --temperature=1 --sizes=8 "
    "--shapes='chain,2 chains,optimal tree'",
    5,
    f"{_RULES_QUICK} --only='rejection; block' --shapes=chain",
  ),
  Measurement("lossy", "compare_rules --tables", 2),
  Measurement(
    "block",
    f"compare_rules {_RULES} --temperature=1 --sizes=4,6,8 --shapes=chain "
    "--only='rejection; block' --limit=32",
    2,
    _RULES_QUICK,
  ),
  Measurement(
    "shapes_greedy",
    f"compare_rules {_RULES} --only=coupled {_TREES}",
    4.5,
    f"{_RULES_QUICK} --shapes='chain,dynamic tree'",
  ),
  Measurement(
    "shapes_sampled",
    f"compare_rules {_RULES} --temperature=1 --only=rejection {_TREES}",
    4.5,
  ),
)
