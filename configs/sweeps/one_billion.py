"""Sweep over k on Llama 3.2 1B's shape, at a given acceptance rate.

  python scripts/sweep.py --sweep=configs/sweeps/one_billion.py \\
    --output=runs/one_billion

9 points, 15 minutes on two CPU cores. The weights are random, so only speed is
meaningful. For results see docs/results/0.1.0/predictions.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the sweep: common settings and its points."""
  config = ConfigDict()
  config.whole = {
    "context": 64,
    "texts": 1,
    "pairs": 4,
    "calibration_repeats": 7,
  }
  config.common = {
    "target": "preset:llama3-1b",
    "random_weights": True,
    "drafter": "lookup",
    "acceptance": "synthetic(0.8)",
    "max_new_tokens": 32,
    "batch": 1,
  }
  config.points = [{"k": k} for k in range(9)]
  # Rounds to fit the cost model to; k = 3 has texts half as long as the points.
  config.calibrate = {"batch": (1,), "k": (3, 10)}
  return config
