"""Tables for a terminal: results, calibrations and choices as text."""

from collections.abc import Sequence

from specdec.benchmark.auto import Choice
from specdec.benchmark.metrics import Estimate
from specdec.benchmark.results import Run
from specdec.benchmark.setup import Setup
from specdec.report import roofline
from specdec.roofline.calibration import Calibration
from specdec.utils.terminal import columns


def by_group(runs: Sequence[Run]) -> str:
  """A table, a line for every group and k."""
  header = ["group", "texts", "k", "tokens/pass", "accepted/drafted"]
  header += ["baseline tok/s", "tok/s", "speedup", "same text"]
  return columns(
    header,
    [
      [
        run.group,
        str(run.acceptance.texts),
        str(run.k),
        str(run.acceptance.tokens_per_pass),
        str(run.acceptance.accepted_per_drafted),
        f"{run.speed.baseline_tokens_per_second:.1f}",
        f"{run.speed.tokens_per_second:.1f}",
        str(run.speed.speedup),
        f"{run.identity.same}/{run.identity.texts}" if run.identity else "-",
      ]
      for run in runs
    ],
  )


def of_passes(passes: Sequence[dict]) -> str:
  """A table of T(n), from the document of scripts/bench.py."""
  first = {e["batch"]: e["seconds"]["median"] for e in passes[::-1]}
  marks, notes = _warnings(passes)
  header = ["batch x n", "ms", "quartiles", "x first", "GB/s", "GFLOP/s"]
  table = columns(
    [*header, "of the roof"],
    [
      [
        f"{e['batch']} x {e['tokens']}{mark}",
        f"{e['seconds']['median'] * 1e3:.2f}",
        " ".join(f"{q * 1e3:.2f}" for q in e["seconds"]["quartiles"]),
        f"{e['seconds']['median'] / first[e['batch']]:.2f}",
        f"{e['bytes_per_second'] / 1e9:.1f}",
        f"{e['flops_per_second'] / 1e9:.0f}",
        f"{e['roof_seconds'] / e['seconds']['median']:.0%}",
      ]
      for e, mark in zip(passes, marks)
    ],
  )
  return table + notes


def _warnings(entries: Sequence[dict]) -> tuple[list[str], str]:
  """Returns each row's mark, and the footnotes that say what it is for."""
  notes = [x for entry in entries for x in entry["warnings"]]
  return (
    [" *" if entry["warnings"] else "" for entry in entries],
    "".join(f"\n  * warning: {note}" for note in notes),
  )


def of_bench(runs: Sequence[dict]) -> str:
  """A table of runs, from the document of scripts/bench.py."""

  def cells(run: dict, mark: str) -> list[str]:
    speed, acceptance = run["speed"], run["acceptance"]
    identity = run["identity"]
    return [
      f"{run['batch']} x {run['k']}{mark}",
      str(Estimate(**acceptance["tokens_per_pass"])),
      f"{speed['baseline_tokens_per_second']:.1f}",
      f"{speed['tokens_per_second']:.1f}",
      str(Estimate(**speed["speedup"])),
      "-" if identity is None else f"{identity['same']}/{identity['texts']}",
      f"{run['acceptance_seconds']['median'] * 1e3:.2f}",
      f"{run['compile']['seconds']:.1f}",
      f"{run['memory'] / 1e6:,.0f}",
    ]

  header = ["batch x k", "tokens/pass", "baseline tok/s", "tok/s", "speedup"]
  header += ["same text", "accept ms", "compile s", "MB"]
  marks, notes = _warnings(runs)
  return columns(header, list(map(cells, runs, marks))) + notes


def of_machine(document: dict) -> str:
  """Where a document of bench.py was measured, and what that machine can do."""
  machine, settings = document["hardware"], document["settings"]
  products = ", ".join(
    f"{dtype} {rate / 1e9:.0f}" for dtype, rate in machine["flops"].items()
  )
  return (
    f"{machine['name']}, load {document['machine']['load']} before and "
    f"{document['load_after']} after; {settings['target']}, "
    f"{settings['dtype']}, context {settings['context']}\n"
    f"reads {document['bandwidth'] / 1e9:.1f} GB/s at the weights' size, now; "
    f"large products, 10^9 operations/s on {machine['date']}: {products}"
  )


def of_document(document: dict, setup: Setup) -> str:
  """The tables of a document of bench.py: passes, then decoding."""
  parts = []
  if document["passes"]:
    table = of_passes(document["passes"])
    parts.append(f"\na pass of n tokens a row\n{table}")
  if document["runs"]:
    parts.append(f"\ndecoding, {setup.description}, {setup.acceptance}")
    prompts = dict.fromkeys(run["prompts"] for run in document["runs"])
    parts += [f"  {text}" for text in prompts]
    parts += [f"  warning: {caveat}" for caveat in document["caveats"]]
    parts.append(of_bench(document["runs"]))
  return "\n".join(parts)


def of_sweep(lines: Sequence[dict]) -> str:
  """A line for every point of a sweep that was measured."""
  header = ["drafter", "rule", "T", "batch", "k", "tokens/round", "predicted"]
  header += ["measured", "measured/predicted"]
  rows = []
  for line in lines:
    point, run = line["point"], line["run"]
    speed = Estimate(**run["speed"]["speedup"])
    predicted = line["prediction"]["speedup"]
    rows.append(
      [
        line["drafter"],
        point.get("acceptance", "coupled"),
        f"{point.get('temperature', 0):g}",
        str(run["batch"]),
        str(run["k"]),
        f"{run['acceptance']['tokens_per_pass']['value']:.2f}",
        f"{predicted:.2f}",
        str(speed),
        f"{speed.value / predicted:.2f}",
      ]
    )
  return columns(header, rows)


# Labels of sibling kinds.
CHILDREN = {
  "none": "drawn",
  "iid": "i.i.d.",
  "without_replacement": "no repeats",
  "deterministic": "likeliest",
}


def of_rules(
  runs: Sequence[dict],
  ranks: dict[str, Sequence[float]],
  tree: dict | None,
  caveats: Sequence[str],
) -> str:
  """A table of compare_rules.py's runs, and the tree that it chose.

  Args:
    ranks, tree: acceptance_by_rank and tree of its document.
  """
  header = ["draft tokens", "shape", "children", "rule", "expected", "measured"]
  header += ["over rejection", "tok/s", "speedup", "distribution"]

  def cells(run):
    comparison = run["comparison"]
    size = run["nodes"] - 1
    distribution = (
      "exact"
      if comparison["lossless"]
      else f"lossy, TV {comparison['distance']:.3f}"
    )
    return [
      str(size),
      comparison["shape"],
      CHILDREN[comparison["siblings"]],
      comparison["rule"],
      str(Estimate(**run["expected"])),
      str(Estimate(**run["acceptance"]["accepted_length"])),
      _percent(Estimate(**run["gain"])),
      f"{run['speed']['tokens_per_second']:.1f}",
      str(Estimate(**run["speed"]["speedup"])),
      distribution,
    ]

  lines = [columns(header, [cells(run) for run in runs])]
  lines += [f"  warning: {caveat}" for caveat in caveats]
  return "\n".join(lines + (_tree(ranks, tree) if tree else []))


def _tree(ranks: dict[str, Sequence[float]], tree: dict) -> list[str]:
  siblings, paths = tree["siblings"], tree["paths"]
  kept = " ".join(f"{share:.2f}" for share in ranks[siblings])
  size = f"{len(paths)} draft tokens in {len(paths[-1])} levels" if paths else 0
  _, baseline = tree["pass_seconds"][0]
  return [
    f"  accepted by rank of a child, {siblings.replace('_', ' ')}: {kept}",
    f"  best tree by the times of this run: {size or 'none'}, "
    f"{tree['tokens']:.2f} tokens expected in {1e3 * tree['seconds']:.1f} ms "
    f"(autoregressive decoding: 1 in {1e3 * baseline:.1f} ms)",
  ]


def _percent(gain: Estimate) -> str:
  """'+3.4 ± 0.2 %'."""
  if gain.value is None:
    return "-"
  error = "" if gain.error is None else f" ± {100 * gain.error:.1f}"
  return f"{100 * (gain.value - 1):+.1f}{error} %"


def of_choice(choice: Choice, batch: int, explain: bool) -> str:
  """The k that was chosen and why: a line, with `explain` tables behind it."""
  acceptance = choice.prefix_acceptance
  shares = " ".join(f"{share:.2f}" for share in acceptance) or "-"
  if choice.k:
    text = (
      f"k = {choice.k}, {choice.speedup:.2f} times autoregressive decoding "
      "expected"
    )
    if batch > 1:
      text += " while all rows are at work"
  else:
    text = "k = 0: no draft token pays here, so this decodes autoregressively"
  text = f"{text} (batch {batch}; acceptance in first rounds {shares})"
  if not explain:
    return text
  header = ["k", "tokens a round", "ms a round", "tokens/s", "speedup"]
  lines = [
    [str(e.k), f"{e.tokens:.2f}", f"{1e3 * e.seconds:.2f}"]
    + [f"{batch * e.tokens / e.seconds:.1f}", f"{e.speedup:.2f}"]
    for e in choice.estimates
  ]
  text += "\n\n" + columns(header, lines)
  for k in sorted({0, choice.k or 1}):
    text += f"\n\na round of k = {k}, {choice.context} slots of cache\n"
    text += roofline.explain(choice.pair.round(batch, k, choice.context))
  return text


def of_calibration(calibration: Calibration) -> str:
  """What was fitted, and how wrong it is."""
  header = ["model", "one", "weights", "KV", "FLOPs", "p", "ms a layer"]
  header += ["points", "rms", "formula alone", "held out", "worst"]
  lines = []
  for name, fit in calibration.fits.items():
    e = fit.efficiency
    lines.append(
      [
        name,
        *(f"{x:.0%}" for x in (e.one, e.weights, e.kv, e.flops)),
        f"{e.p:.2f}",
        f"{1e3 * e.layer_overhead:z.3f}",
        str(fit.in_sample.points),
        f"{fit.in_sample.rms:.1%}",
        f"{fit.formula.rms:.1%}",
        f"{fit.held_out.rms:.1%} of {fit.held_out.points}",
        f"{fit.held_out.worst:+.1%}",
      ]
    )
  text = columns(header, lines) + "\n\n"
  header = ["overhead of rounds", "batch", "ms a round", "ms a level"]
  header += ["rounds", "rms", "worst"]
  lines = []
  for name, fit in calibration.overhead.items():
    wrong = ["", "", ""]
    if fit.errors.points:  # more rounds than numbers that were fitted to them
      wrong = [str(fit.errors.points), f"{fit.errors.rms:.1%}"]
      wrong.append(f"{fit.errors.worst:+.1%}")
    for kind, one in ((name, fit.ours), ("  baseline", fit.baseline)):
      for batch, fixed, of_level in one.rows:
        values = f"{1e3 * fixed:z.3f}", f"{1e3 * of_level:z.3f}"
        lines.append([kind, f"{batch:g}", *values, *wrong])
        kind, wrong = "", ["", "", ""]
  return text + columns(header, lines)
