"""Tables 2 and 3 of Leviathan et al. (arXiv:2211.17192), measured anew.

  python scripts/sweep.py --sweep=configs/sweeps/leviathan.py \\
    --output=runs/leviathan
  python scripts/sweep.py --sweep=configs/sweeps/leviathan.py:t5 \\
    --output=runs/t5

The first runs on the shipped encoder-decoder, in 15 minutes on two CPU cores:
docstrings for functions and bodies for signatures instead of translation and
summaries. The second takes the paper's rows, on an accelerator with room for 11
billion weights (--mesh=model:4 shares them out), but Flan-T5's weights, which
know both tasks; the paper fine-tuned its own. It reads ende.jsonl and
cnndm.jsonl from the current folder, 64 prompts each, which you write from your
copies of WMT and CNN/DM: lines {"prompt": "translate English to German: ..."}
and {"prompt": "summarize: ..."}.

Every point has alpha, c, the speedup that they predict by theorem 3.8, and what
was measured; alpha by itself is table 3 as far as its drafts are trained models
(not its n-grams). docs/results/t5.md has the first.
"""

import itertools

from ml_collections import ConfigDict

from specdec.checkpoints import shipped
from specdec.report.papers import LEVIATHAN_2

FOLDER = f"specdec/shipped/{shipped.T5}"  # from the repository's root
TASKS = {"EnDe": "ende.jsonl", "CNNDM": "cnndm.jsonl"}


def get_config(models: str = "shipped") -> ConfigDict:
  """Returns the sweep of 'shipped' models or of Google's 't5'."""
  if models not in ("shipped", "t5"):
    raise ValueError(f"{models!r} is unknown; known: shipped, t5")
  config = ConfigDict()
  config.common = {"acceptance": "rejection", "batch": 1}
  config.calibrate = {"batch": (1,), "k": (2, 6)}
  if models == "shipped":
    config.common.update({"target": shipped.T5, "max_new_tokens": 64})
    config.whole = {"context": 128, "texts": 32, "pairs": 64}
    drafts = [(f"model({shipped.T5_DRAFT})", k) for k in (3, 5, 7)]
    drafts += [("early_exit(1)", 3), ("quantized(int8)", 5), ("lookup", 5)]
    config.points = [
      {
        "prompt_file": f"{FOLDER}/{task}.jsonl",
        "drafter": drafter,
        "temperature": temperature,
        "k": k,
      }
      for task, temperature, (drafter, k) in itertools.product(
        ("docstring", "body"), (0.0, 1.0), drafts
      )
    ]
  else:
    config.common.update(
      {
        "target": "google/flan-t5-xxl",
        "max_new_tokens": 128,
        "dtype": "bfloat16",
      }
    )
    config.whole = {"context": 512, "texts": 64, "pairs": 64}
    config.points = [
      {
        "prompt_file": TASKS[row.task],
        "drafter": f"model(google/flan-t5-{row.draft})",
        "temperature": float(row.temperature),
        "k": row.k,
      }
      for row in LEVIATHAN_2
    ]
  return config
