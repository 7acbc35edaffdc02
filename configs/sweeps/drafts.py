"""The shipped drafts, k x draft size, batch 1.

  python scripts/sweep.py --sweep=configs/sweeps/drafts.py --output=runs/drafts

16 points, a quarter of an hour on two CPU cores. The drafts were trained for
unlike numbers of steps (specdec/shipped/README.md), so what is compared is the
prediction with the measurement, not size with size.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
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
    {"draft": f"stdlib-{size}m", "k": k}
    for size in ("0.3", "0.6", "1", "1.4")
    for k in (1, 2, 4, 6)
  ]
  # Rounds that the cost model is fitted to; no point repeats them.
  config.calibrate = {"batch": (1,), "k": (3, 8)}
  return config
