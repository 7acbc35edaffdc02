"""Sweep of three points, to see that sweeps work.

  python scripts/sweep.py --sweep=configs/sweeps/quick.py --output=runs/quick

A minute on two CPU cores; far too little is timed for the numbers to mean much.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the sweep: common settings and its points."""
  config = ConfigDict()
  config.whole = {
    "context": 32,
    "texts": 2,
    "pairs": 2,
    "calibration_repeats": 3,
  }
  config.common = {
    "target": "stdlib-11m",
    "drafter": "lookup",
    "max_new_tokens": 16,
    "batch": 1,
  }
  config.points = [{"k": k} for k in (0, 2, 4)]
  config.calibrate = {"batch": (1,), "k": (3,), "max_new_tokens": 12}
  return config
