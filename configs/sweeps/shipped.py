"""Sweep over k, batch and temperature on the shipped target and draft.

  python scripts/sweep.py --sweep=configs/sweeps/shipped.py \\
    --output=runs/shipped

90 points, about an hour on two CPU cores. For results see
docs/results/predictions.md.
"""

import itertools

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the sweep: common settings and its points."""
  config = ConfigDict()
  config.whole = {
    "context": 64,
    "texts": 16,
    "pairs": 48,
    "calibration_repeats": 15,
  }
  config.common = {
    "target": "stdlib-11m",
    "drafter": "model(stdlib-1m)",
    "max_new_tokens": 64,
    "acceptance": "rejection",
  }
  config.points = [
    {"temperature": temperature, "batch": batch, "k": k}
    for temperature, batch, k in itertools.product(
      (0.0, 1.0), (1, 2, 4, 8, 16), range(9)
    )
  ]
  # Rounds to fit the cost model to. They include batch 1, which compiles to
  # different kernels; their texts are shorter, with fewer cache slots.
  config.calibrate = {
    "batch": (1, 3, 6, 12, 20),
    "k": (2, 5, 8),
    "max_new_tokens": 32,
  }
  return config
