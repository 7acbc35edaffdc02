"""Sweep over k and the size of the shipped draft models, at batch 1.

  python scripts/sweep.py --sweep=configs/sweeps/drafts.py --output=runs/drafts

16 points, 15 minutes on two CPU cores. The drafts were trained for different
numbers of steps (specdec/shipped/README.md), so the sweep compares predictions
with measurements rather than draft sizes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """Returns the sweep: common settings and its points."""
  config = ConfigDict()
  config.whole = {"context": 64, "texts": 16, "pairs": 12}
  config.common = {
    "target": "stdlib-11m",
    "max_new_tokens": 64,
    "acceptance": "rejection",
    "temperature": 0.0,
    "batch": 1,
  }
  config.points = [
    {"drafter": f"model(stdlib-{size}m)", "k": k}
    for size in ("0.3", "0.6", "1", "1.4")
    for k in (1, 2, 4, 6)
  ]
  # Rounds to fit the cost model to; they are not points of the sweep.
  config.calibrate = {"batch": (1,), "k": (3, 8)}
  return config
