"""The shipped pair: k x batch x temperature.

  python scripts/sweep.py --sweep=configs/sweeps/shipped.py \\
    --output=runs/shipped

90 points, about an hour on two CPU cores. What comes out is in docs/results.md.
"""

import itertools

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  config = ConfigDict()
  config.whole = {
    "context": 64,
    "texts": 16,
    "pairs": 12,
    "calibration_repeats": 15,
  }
  config.common = {
    "target": "stdlib-11m",
    "draft": "stdlib-1m",
    "max_new_tokens": 64,
    "acceptance": "rejection",
  }
  config.points = [
    {"temperature": temperature, "batch": batch, "k": k}
    for temperature, batch, k in itertools.product(
      (0.0, 1.0), (1, 2, 4, 8, 16), range(9)
    )
  ]
  # Rounds that the cost model is fitted to. Batch 1 has programs of its own and
  # must be among them; in shorter texts, so with fewer slots of cache.
  config.calibrate = {
    "batch": (1, 3, 6, 12, 20),
    "k": (2, 5, 8),
    "max_new_tokens": 32,
  }
  return config
