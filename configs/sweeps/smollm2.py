"""SmolLM2-135M-Instruct: prompt lookup and early exit, k = 0 to 8, greedy.

  python scripts/sweep.py --sweep=configs/sweeps/smollm2.py \\
    --output=runs/smollm2

18 points, half an hour on two CPU cores. What comes out is in docs/results.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
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
    {**drafter, "k": k}
    for drafter in (
      {"drafter": "lookup"},
      {"drafter": "early_exit", "exit_layer": 26},
    )
    for k in range(9)
  ]
  # Rounds that the cost model is fitted to; k = 3 in texts half as long.
  config.calibrate = {"batch": (1,), "k": (3, 10)}
  return config
