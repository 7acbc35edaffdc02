"""Tables of drafters side by side, and of subsets of layers."""

import json
from collections.abc import Callable, Sequence

from specdec.utils.terminal import columns

_SHOWN = 5  # of the best subsets


def of_drafters(runs: Sequence[dict]) -> str:
  """Two tables for each temperature, a line for each drafter.

  Args:
    runs: of a document of compare_drafters.py.
  """
  ks = sorted({run["k"] for run in _chains(runs)})
  shapes = [*(f"k={k}" for k in ks), "tree"]
  parts = []
  for temperature in sorted({r["drafter"]["temperature"] for r in runs}):
    groups: dict[str, list[dict]] = {}
    for run in runs:
      if run["drafter"]["temperature"] == temperature:
        groups.setdefault(run["drafter"]["name"], []).append(run)
    title = f"temperature {temperature:g}" if temperature else "greedy"
    header = ["drafter", "weights", "MB a draft token", "at position 1 2 3 4"]
    lines = [
      [name, *_about(group), *_by_shape(group, ks, _tokens)]
      for name, group in groups.items()
    ]
    table = columns([*header, *shapes], lines)
    parts.append(f"{title}; tokens a pass\n\n{table}")
    lines = [
      [name, *_by_shape(group, ks, _speed), *_best(group)]
      for name, group in groups.items()
    ]
    header = ["drafter", *shapes, "best", "tokens/s", "baseline"]
    table = columns(header, lines)
    parts.append(f"{title}; speedup, measured / by bytes\n\n{table}")
  return "\n\n".join(parts)


def _chains(runs: Sequence[dict]) -> list[dict]:
  return [run for run in runs if run["drafter"]["shape"] == "chain"]


def _about(runs: Sequence[dict]) -> list[str]:
  """A drafter at one temperature: weights, bytes, acceptance by position."""
  longest = max(_chains(runs), key=lambda run: run["k"])
  kept = longest["acceptance"]["conditional"][:4]
  weights, step_bytes = (
    longest["drafter"][name] for name in ("weights", "step_bytes")
  )
  return [
    f"{weights / 1e6:.2f} M" if weights else "-",
    f"{step_bytes / 1e6:.2f}" if step_bytes else "-",
    " ".join("-" if x["value"] is None else f"{x['value']:.2f}" for x in kept),
  ]


def _by_shape(
  runs: Sequence[dict], ks: Sequence[int], cell: Callable[[dict], str]
) -> list[str]:
  """Returns cells of the chain of every k, then of the tree."""
  by_k = {run["k"]: cell(run) for run in _chains(runs)}
  trees = [cell(run) for run in runs if run["drafter"]["shape"] == "tree"]
  return [*(by_k.get(k, "") for k in ks), trees[0] if trees else ""]


def _tokens(run: dict) -> str:
  return f"{run['acceptance']['tokens_per_pass']['value']:.2f}"


def _speed(run: dict) -> str:
  predicted = run["predicted"]
  predicted = "-" if predicted is None else f"{predicted:.2f}"
  return f"{run['speed']['speedup']['value']:.2f} / {predicted}"


def _best(runs: Sequence[dict]) -> list[str]:
  """The fastest chain: its speedup, and tokens per second of both."""
  best = max(_chains(runs), key=lambda run: run["speed"]["speedup"]["value"])
  speed, speedup = best["speed"], best["speed"]["speedup"]
  error = "" if speedup["error"] is None else f" ± {speedup['error']:.2f}"
  return [
    f"k={best['k']}: {speedup['value']:.2f}{error}",
    f"{speed['tokens_per_second']:.0f}",
    f"{speed['baseline_tokens_per_second']:.0f}",
  ]


def of_subsets(trials: Sequence[dict]) -> str:
  """The best subsets that choose_layers.py tried, and that of no sublayer.

  Args:
    trials: of its document.
  """
  header = ["", "attention skipped", "MLP skipped", "k", "drafted/round"]
  header += ["tokens/round", "tokens/s"]
  distinct = {json.dumps(trial): trial for trial in trials}
  ranked = sorted(distinct.values(), key=lambda x: -x["tokens_per_second"])
  rows = [(str(n), trial) for n, trial in enumerate(ranked[:_SHOWN], 1)]
  nothing = [x for x in ranked if not (x["skip_attention"] + x["skip_mlp"])]
  rows += [("-", trial) for trial in nothing[:1]]
  return columns(
    header,
    [
      [
        place,
        _spans(trial["skip_attention"]),
        _spans(trial["skip_mlp"]),
        str(trial["k"]),
        f"{trial['drafted_per_round']:.2f}",
        f"{trial['tokens_per_round']:.2f}",
        f"{trial['tokens_per_second']:.1f}",
      ]
      for place, trial in rows
    ],
  )


def _spans(numbers: Sequence[int]) -> str:
  """Writes (1, 4, 5, 6) as '1,4-6'."""
  spans: list[list[int]] = []
  for number in sorted(set(numbers)):
    if spans and number == spans[-1][-1] + 1:
      spans[-1][1:] = [number]
    else:
      spans.append([number])
  return ",".join("-".join(map(str, span)) for span in spans) or "none"
