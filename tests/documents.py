"""Documents of runs, as programs write them."""


def run(group="all", k=4, batch=1, tokens=2.1, speedup=1.4, error=0.05):
  """One run, in which nothing is shared with another."""
  return {
    "group": group,
    "k": k,
    "batch": batch,
    "nodes": k + 1,
    "acceptance": {
      "tokens_per_pass": {"value": tokens, "error": error},
      "accepted_length": {"value": tokens, "error": error},
      "texts": 2,
    },
    "speed": {
      "speedup": {"value": speedup, "error": error},
      "baseline_tokens_per_second": 60.0,
      "tokens_per_second": 9.0,
      "seconds": 1.0,
    },
    "identity": {"texts": 2, "same": 2},
  }
