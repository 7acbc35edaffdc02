"""Sweep over k for prompt lookup and early exit on SmolLM2-135M-Instruct.

  python scripts/sweep.py --sweep=configs/sweeps/smollm2.py \\
    --output=runs/smollm2

18 points, greedy, half an hour on two CPU cores. For results see
docs/results/predictions.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the sweep: common settings and its points."""
  config = ConfigDict()
  config.whole = {
    "context": 96,
    "texts": 2,
    "pairs": 6,
    "calibration_repeats": 9,
  }
  config.common = {
    "target": "smollm2-135m-instruct",
    "max_new_tokens": 32,
    "batch": 1,
  }
  config.points = [
    {"drafter": drafter, "k": k}
    for drafter in ("lookup", "early_exit(26)")
    for k in range(9)
  ]
  # Rounds to fit the cost model to; k = 3 has texts half as long as the points.
  config.calibrate = {"batch": (1,), "k": (3, 10)}
  return config
