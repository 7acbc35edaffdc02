"""Tables for a terminal: results, calibrations and choices as text."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.benchmark import sweeps
from specdec.benchmark.auto import Choice
from specdec.benchmark.metrics import Estimate
from specdec.benchmark.results import Run
from specdec.benchmark.setup import Setup
from specdec.report import roofline
from specdec.roofline.calibration import Calibration
from specdec.utils import terminal

ALL = "all"  # the group of everything


def listed(
  rows: Iterable, columns: Mapping[str, str | Callable[[Any], object]]
) -> str:
  """Formats a table, a line for each row. A column is a format string whose
  argument is the row, or a function of the row."""
  return terminal.columns([*columns], _cells(rows, columns))


def markdown(
  rows: Iterable, columns: Mapping[str, str | Callable[[Any], object]]
) -> str:
  """Formats the same table as a page has it."""
  lines = [[*columns], ["---"] * len(columns), *_cells(rows, columns)]
  lines = [[x.replace("|", "\\|") for x in line] for line in lines]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(rows: Iterable, columns: Mapping) -> list[list[str]]:
  show = [x if callable(x) else x.format for x in columns.values()]
  return [[str(entry(row)) for entry in show] for row in rows]


def estimate(*path: str | int) -> Callable[[dict], Estimate]:
  """Returns a column of estimates, found in a document by their path."""
  return lambda row: Estimate(**functools.reduce(dict.__getitem__, path, row))


def acceptance_length(run: Mapping) -> str:
  """Returns vLLM's mean acceptance length of a run's document; '-' where
  nothing was drafted, or the document is older than the entry."""
  counts = run["acceptance"].get("speculative_decoding") or {}
  length = counts.get("mean_acceptance_length")
  return "-" if length is None else f"{length:.2f}"


def by_group(runs: Sequence[Run]) -> str:
  """Formats a line for every group and k; of one group alone, none for all."""
  if len({run.group for run in runs}) == 2:
    runs = [run for run in runs if run.group != ALL]
  columns = {
    "group": "{.group}",
    "texts": "{.acceptance.texts}",
    "k": "{.k}",
    "tokens/pass": "{.acceptance.tokens_per_pass}",
    "acceptance length": lambda run: acceptance_length(run.document()),
    "accepted/drafted": "{.acceptance.accepted_per_drafted}",
    "baseline tok/s": "{.speed.baseline_tokens_per_second:.1f}",
    "tok/s": "{.speed.tokens_per_second:.1f}",
    "speedup": "{.speed.speedup}",
    "same text": lambda run: _same(run.identity and vars(run.identity)),
  }
  return listed(runs, columns)


def _same(identity: Mapping | None) -> str:
  return f"{identity['same']}/{identity['texts']}" if identity else "-"


def speedup_of(run: Mapping) -> float:
  """Returns the speedup in a run's document."""
  return run["speed"]["speedup"]["value"]


def share(estimate: Mapping) -> str:
  """'87 ± 2 %'."""
  return f"{Estimate(**estimate):.0%}"


def of_document(document: dict, setup: Setup) -> str:
  """Formats a document of bench.py: times of passes, then decoding."""
  parts = []
  if passes := document["passes"]:
    columns = {
      "batch x n": "{0[batch]} x {0[tokens]}{0[mark]}",
      "ms": lambda x: f"{1e3 * x['seconds']['median']:.2f}",
      "quartiles": lambda x: "{:.2f} {:.2f}".format(
        *(1e3 * quartile for quartile in x["seconds"]["quartiles"])
      ),
      "x first": estimate("times_first"),
      "GB/s": lambda x: f"{x['bytes_per_second'] / 1e9:.1f}",
      "GFLOP/s": lambda x: f"{x['flops_per_second'] / 1e9:.0f}",
      "of the rate read then": lambda x: share(x["bandwidth_share"]),
      "of the roof": lambda x: (
        f"{x['roof_seconds'] / x['seconds']['median']:.0%}"
      ),
    }
    parts += ["\na pass of n tokens a row", _with_warnings(passes, columns)]
  if runs := document["runs"]:
    parts.append(f"\ndecoding, {setup.description}, {setup.acceptance}")
    prompts = dict.fromkeys(run["prompts"] for run in runs)
    parts += [f"  {text}" for text in prompts]
    parts += [f"  warning: {caveat}" for caveat in document["caveats"]]
    columns = {
      "batch x k": lambda x: (
        f"{x['batch']} x {x.get('length', x['k'])}{x['mark']}"
      ),
      "tokens/pass": estimate("acceptance", "tokens_per_pass"),
      "acceptance length": acceptance_length,
      "baseline tok/s": "{[speed][baseline_tokens_per_second]:.1f}",
      "tok/s": "{[speed][tokens_per_second]:.1f}",
      "speedup": estimate("speed", "speedup"),
      "same text": lambda x: _same(x["identity"]),
      "accept ms": lambda x: f"{1e3 * x['acceptance_seconds']['median']:.2f}",
      "compile s": "{[compile][seconds]:.1f}",
      "MB": lambda x: f"{x['memory'] / 1e6:,.0f}",
    }
    parts.append(_with_warnings(runs, columns))
  return "\n".join(parts)


def _with_warnings(entries: Sequence[dict], columns: Mapping) -> str:
  """Formats a table with marks and footnotes for the entries' warnings."""
  notes = [x for entry in entries for x in entry["warnings"]]
  marked = [x | {"mark": " *" if x["warnings"] else ""} for x in entries]
  footnotes = "".join(f"\n  * warning: {note}" for note in notes)
  return listed(marked, columns) + footnotes


def of_machine(document: dict) -> str:
  """Names the machine of a document of bench.py and what it can do."""
  machine, settings = document["hardware"], document["settings"]
  products = ", ".join(
    f"{dtype} {rate / 1e9:.0f}" for dtype, rate in machine["flops"].items()
  )
  types = settings["dtype"]
  if settings.get("weights"):
    types += f", weights {settings['weights']}"
  return (
    f"{machine['name']}, load {document['machine']['load']} before and "
    f"{document['load_after']} after; {settings['target']}, "
    f"{types}, context {settings['context']}\n"
    f"reads {document['bandwidth'] / 1e9:.1f} GB/s at the weights' size, now; "
    f"large products, 10^9 operations/s on {machine['date']}: {products}"
  )


def number(value: float | None) -> str:
  """'1.23', or nothing."""
  return "" if value is None else f"{value:.2f}"


def _alpha(line: dict) -> float | None:
  run = line["run"]
  return run["acceptance"]["alpha"]["value"] if run["k"] else None


def _draft_cost(line: dict) -> float | None:
  return line["prediction"].get("cost") if line["run"]["k"] else None


PREDICTED = {  # columns of a sweep's points
  "alpha": lambda line: number(_alpha(line)),
  "c": lambda line: number(_draft_cost(line)),
  "by alpha, c": lambda line: number(sweeps.by_formula(line)),
  "predicted": "{[prediction][speedup]:.2f}",
  "measured": estimate("run", "speed", "speedup"),
}


def of_sweep(lines: Sequence[dict]) -> str:
  """Formats a line for every point of a sweep that was measured."""
  columns = {
    "drafter": "{[drafter]}",
    "rule": lambda line: line["point"].get("acceptance", "coupled"),
    "T": lambda line: f"{line['point'].get('temperature', 0):g}",
    "batch": "{[run][batch]}",
    "k": "{[run][k]}",
    "tokens/pass": "{[run][acceptance][tokens_per_pass][value]:.2f}",
    **PREDICTED,
    "measured/predicted": lambda line: f"{sweeps.ratio(line):.2f}",
  }
  caveats = sorted({caveat for line in lines for caveat in line["caveats"]})
  warnings = "".join(f"\n  warning: {caveat}" for caveat in caveats)
  return listed(lines, columns) + warnings


ROUNDING = 1e-4  # total variation that rules may have from rounding alone
# Labels of sibling kinds.
CHILDREN = {
  "none": "drawn",
  "iid": "i.i.d.",
  "without_replacement": "no repeats",
  "deterministic": "likeliest",
}


def of_rules(
  runs: Sequence[dict],
  acceptance: dict[str, Sequence],
  tree: dict | None,
  caveats: Sequence[str],
  listed: Callable[[Iterable, Mapping], str] = listed,
) -> str:
  """Formats the runs of compare_rules.py, and the tree that it chose."""
  columns = {
    "draft tokens": lambda run: run["nodes"] - 1,
    "shape": "{[comparison][shape]}",
    "levels": "{[k]}",
    "children": lambda run: CHILDREN[run["comparison"]["siblings"]],
    "rule": "{[comparison][rule]}",
    "expected": estimate("expected"),
    "measured": estimate("acceptance", "accepted_length"),
    "over rejection": lambda run: percent(Estimate(**run["gain"])),
    "tok/s": "{[speed][tokens_per_second]:.1f}",
    "speedup": estimate("speed", "speedup"),
    "distribution": lambda run: _distribution(**run["comparison"]),
  }
  if any("optimum_on_tables" in run["comparison"] for run in runs):
    columns["of optimum"] = lambda run: _of_optimum(**run["comparison"])
  lines = [listed(runs, columns)]
  wrong = {
    run["comparison"]["rule"] for run in runs if _is_wrong(**run["comparison"])
  }
  caveats = [
    *caveats,
    *(
      f"{rule} calls itself lossless, and its text is not the target's: "
      "specdec.testing.check_rule shows where"
      for rule in sorted(wrong)
    ),
  ]
  lines += [f"  warning: {caveat}" for caveat in caveats]
  return "\n".join(lines + (_tree(acceptance, tree) if tree else []))


def _is_wrong(
  lossless: bool, distance: float | None = None, **comparison
) -> bool:
  """Whether a rule that calls itself lossless is not; of one that shares the
  target's noise there is no distance."""
  return lossless and (distance or 0) > ROUNDING


def _distribution(
  lossless: bool, distance: float | None = None, **comparison
) -> str:
  if _is_wrong(lossless, distance):
    return f"NOT exact, TV {distance:.3f}"
  if lossless:
    return f"exact to {distance:.0e}" if distance else "exact"
  return "lossy" if distance is None else f"lossy, TV {distance:.3f}"


def _of_optimum(
  accepted_on_tables: float | None = None,
  optimum_on_tables: float | None = None,
  **comparison,
) -> str:
  """Share of what a lossless rule can accept, on small tables."""
  if accepted_on_tables is None or not optimum_on_tables:
    return "-"
  return f"{accepted_on_tables / optimum_on_tables:.1%}"


def of_engines(document: dict, form=listed) -> str:
  """Formats a document of compare_engines.py; `form` makes its table."""

  def rate(estimate: dict) -> str:
    return f"{Estimate(**estimate):.1f}"

  def ratio(engine: dict) -> str:
    passes = engine["pass_seconds"]
    return f"{passes[-1][1] / passes[0][1]:.2f}" if passes else "-"

  prompts, engines = document["decoded"], document["engines"]
  columns = {"new tokens/s": "{[name]}"}
  for i, prompt in enumerate(prompts):
    heading = f"{i} ({prompt['group']})"
    columns[heading] = lambda x, i=i: rate(x["tokens_per_second"][i])
  columns |= {
    "mean": lambda engine: rate(engine["mean"]),
    "x baseline": estimate("speedup"),
    "same text": lambda engine: _same(engine["identity"]),
    "T(8) / T(1)": ratio,
  }
  sizes = ", ".join(
    "{prompt_tokens} + {new_tokens}".format(**prompt) for prompt in prompts
  )
  lines = [f"tokens of each prompt, and new ones: {sizes}"]
  lines.append(form(engines, columns))
  for engine in engines:
    for sentence in engine["identity"]["differences"]:
      lines.append(f"  {engine['name']}: {sentence}")
  lines += [f"  warning: {caveat}" for caveat in document["caveats"]]
  return "\n".join(lines)


def _tree(acceptance: dict[str, Sequence], tree: dict) -> list[str]:
  siblings, paths = tree["siblings"], tree["paths"]
  rates = np.atleast_2d(acceptance[siblings])
  kept = " ".join(f"{share:.2f}" for share in rates[0])
  if len(rates) > 1:
    kept += "; of the first by depth: "
    first = np.trim_zeros(rates[:, 0], "b")
    kept += " ".join(f"{share:.2f}" for share in first)
  size = f"{len(paths)} draft tokens in {len(paths[-1])} levels" if paths else 0
  _, baseline = tree["pass_seconds"][0]
  return [
    f"  accepted by rank of a child, {siblings.replace('_', ' ')}: {kept}",
    f"  best tree by the times of this run: {size or 'none'}, "
    f"{tree['tokens']:.2f} tokens expected in {1e3 * tree['seconds']:.1f} ms "
    f"(autoregressive decoding: 1 in {1e3 * baseline:.1f} ms)",
  ]


def percent(gain: Estimate) -> str:
  """'+3.4 ± 0.2 %'."""
  more = None if gain.value is None else gain.value - 1
  return f"{Estimate(more, gain.error, gain.samples):+.1%}"


def of_choice(choice: Choice, batch: int, explain: bool) -> str:
  """Formats the k that was chosen and why, with `explain` tables of costs."""
  acceptance = choice.prefix_acceptance
  shares = " ".join(f"{share:.2f}" for share in acceptance) or "-"
  if choice.k:
    text = f"k = {choice.k}, {choice.speedup:.2f} times autoregressive decoding"
    text += " expected" + (" while all rows are at work" if batch > 1 else "")
  else:
    text = "k = 0: no draft token pays here, so this decodes autoregressively"
  text = f"{text} (batch {batch}; acceptance in first rounds {shares})"
  if not explain:
    return text
  columns = {
    "k": "{.k}",
    "tokens/pass": "{.tokens:.2f}",
    "ms a round": lambda x: f"{1e3 * x.seconds:.2f}",
    "tokens/s": lambda x: f"{batch * x.tokens / x.seconds:.1f}",
    "speedup": "{.speedup:.2f}",
  }
  text += "\n\n" + listed(choice.estimates, columns)
  for k in sorted({0, choice.k or 1}):
    text += f"\n\na round of k = {k}, {choice.context} slots of cache\n"
    text += roofline.explain(choice.pair.round(batch, k, choice.context))
  return text


def of_calibration(calibration: Calibration) -> str:
  """Formats what was fitted, and how wrong it is."""
  columns = {
    "model": "{[0]}",
    "one": "{[1].efficiency.one:.0%}",
    "weights": "{[1].efficiency.weights:.0%}",
    "KV": "{[1].efficiency.kv:.0%}",
    "FLOPs": "{[1].efficiency.flops:.0%}",
    "p": "{[1].efficiency.p:.2f}",
    "ms a layer": lambda x: f"{1e3 * x[1].efficiency.layer_overhead:z.3f}",
    "points": "{[1].in_sample.points}",
    "rms": "{[1].in_sample.rms:.1%}",
    "formula alone": "{[1].formula.rms:.1%}",
    "held out": "{0[1].held_out.rms:.1%} of {0[1].held_out.points}",
    "worst": "{[1].held_out.worst:+.1%}",
  }
  text = listed(calibration.fits.items(), columns)
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
  return text + "\n\n" + terminal.columns(header, lines)


def of_beams(entries: Sequence[dict], form=listed) -> str:
  """Formats a line for every width of a beam search."""
  columns = {
    "width": "{0[width]}",
    "steps": "{0[steps]}",
    "rounds": "{0[rounds]}",
    "steps/round": "{0[steps_per_round]:.2f}",
    "plain s": "{0[plain_seconds]:.2f}",
    "s": "{0[seconds]:.2f}",
    "speedup": estimate("speedup"),
    "same beams": "{0[same_beams]} of {0[batches]}",
  }
  return form(entries, columns)
