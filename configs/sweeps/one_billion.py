"""Llama 3.2 1B's shape, random weights, draft tokens kept at a given rate.

  python scripts/sweep.py --sweep=configs/sweeps/one_billion.py \\
    --output=runs/one_billion

9 points, a quarter of an hour on two CPU cores. The text is meaningless; what
is evaluated is speed. What comes out is in docs/results.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
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
    "min_ngram": 0,
    "acceptance": "synthetic",
    "rates": ["0.8"],
    "max_new_tokens": 32,
    "batch": 1,
  }
  config.points = [{"k": k} for k in range(9)]
  # Rounds that the cost model is fitted to; k = 3 in texts half as long.
  config.calibrate = {"batch": (1,), "k": (3, 10)}
  return config
