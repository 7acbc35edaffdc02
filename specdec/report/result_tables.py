"""Tables and pictures of docs/results, of the documents in results/.

Each takes documents by name, and the names that a region gives.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from specdec.benchmark import sweeps
from specdec.benchmark.metrics import Estimate
from specdec.report import (
  drafter_tables,
  equal_tables,
  goodput_tables,
  length_tables,
  lossy_table,
  mixture_tables,
  result_plots,
  steps,
  sweep_page,
  tables,
)
from specdec.report.long_contexts import long_contexts
from specdec.report.tables import estimate, markdown, speedup_of
from specdec.roofline.calibration import Calibration


class Missing(KeyError):
  """A measurement that is not there; its name."""

  @property
  def sentence(self) -> str:
    """What a page says in its place."""
    return (
      f"not measured yet: `python scripts/reproduce.py --only={self.args[0]}`"
    )


def head(document: dict) -> str:
  """Says what was run when and where, in one line."""
  versions = document["versions"]
  machine, about = document.get("machine", {}), document["measurement"]
  parts = [
    document["date"][:16].replace("T", " "),
    f"commit {versions.get('commit') or 'unknown'}",
  ]
  if machine:
    parts.append(f"{machine['device']}, {machine['cpu_cores']} cores")
  if about["busy_cores"] is not None:
    parts.append(f"{about['busy_cores']:.1f} of them busy before")
  if "jax" in versions:
    kernels = "C++ kernels" if versions["kernels"] else "products of XLA"
    names = "Python {python}, jax {jax}, flax {flax}".format(**versions)
    parts += [names, kernels]
  parts.append(f"{about['minutes']:.1f} min")
  quick = "**a quick run, not a measurement**: " * about["quick"]
  return f"- {quick}`{document['command']}`: {'; '.join(parts)}"


def find(entries: Sequence[dict], **wanted) -> dict:
  """Returns the entry whose members say so, or raises KeyError."""
  for entry in entries:
    if all(entry[name] == x for name, x in wanted.items()):
      return entry
  raise KeyError(wanted)


def passes(documents: Mapping, *names: str) -> str:
  """T(n): a row for each document and batch, ms and times one token."""
  rows, counts = [], {}
  for name in names:
    document = documents[name]
    for batch in dict.fromkeys(x["batch"] for x in document["passes"]):
      some = {x["tokens"]: x for x in document["passes"] if x["batch"] == batch}
      rows.append({"of": document, "batch": batch, "passes": some})
      counts |= dict.fromkeys(some)

  def cell(n: int, row: dict) -> str:
    if n not in row["passes"]:
      return ""
    one = row["passes"][n]
    times = Estimate(**one["times_first"])
    shown = "" if n == min(row["passes"]) else f" ({times})"
    return f"{1e3 * one['seconds']['median']:.2f}{shown}"

  def first(row: dict) -> dict:
    return row["passes"][min(row["passes"])]

  def roof(row: dict) -> str:
    one = first(row)
    return f"{one['roof_seconds'] / one['seconds']['median']:.0%}"

  columns = {
    "products": lambda row: row["of"]["versions"]["kernels"] or "XLA",
    "weights": lambda row: row["of"]["settings"].get("weights") or "as dtype",
    "context": "{[of][settings][context]}",
    "rows": "{[batch]}",
    **{f"n = {n}": partial(cell, n) for n in sorted(counts)},
    "GB/s read then": lambda row: f"{first(row)['bandwidth'] / 1e9:.0f}",
    "first, of that": lambda row: tables.share(first(row)["bandwidth_share"]),
    "first, of the roof": roof,
    "MB, this process": lambda row: f"{row['of']['peak_memory'] / 1e6:,.0f}",
  }
  return markdown(rows, columns)


def slots(documents: Mapping, *names: str) -> str:
  """One token after a context, in caches of several sizes."""
  rows = []
  for name in names:
    entries = documents[name]["passes"]
    rows += [{"of": documents[name], "x": x} for x in entries]
  columns = {
    "target": "{[of][settings][target]}",
    "committed": "{[x][context]}",
    "slots": "{[x][slots]}",
    "ms": lambda row: f"{1e3 * row['x']['seconds']['median']:.2f}",
    "quartiles": lambda row: " to ".join(
      f"{1e3 * q:.2f}" for q in row["x"]["seconds"]["quartiles"]
    ),
    "times the first": estimate("x", "times_first"),
  }
  return markdown(rows, columns)


def same(run: dict) -> str:
  """How many texts equal autoregressive decoding's."""
  identity = run["identity"]
  return f"{identity['same']} of {identity['texts']}" if identity else "-"


def decoding(documents: Mapping, name: str) -> str:
  """Runs of bench.py, by batch and k."""
  document = documents[name]
  columns = {
    "rows": "{[batch]}",
    "k": "{[k]}",
    "tokens/pass": estimate("acceptance", "tokens_per_pass"),
    "baseline, tokens/s": "{[speed][baseline_tokens_per_second]:.0f}",
    "tokens/s": "{[speed][tokens_per_second]:.0f}",
    "speedup": estimate("speed", "speedup"),
    "same text": same,
    "compiled in, s": "{[compile][seconds]:.1f}",
    "MB": lambda run: f"{run['memory'] / 1e6:,.0f}",
  }
  prompts = ", ".join(dict.fromkeys(x["prompts"] for x in document["runs"]))
  return f"{prompts}\n\n{markdown(document['runs'], columns)}"


def groups(documents: Mapping, name: str) -> str:
  """Runs of eval.py: tokens per target step and speedup, by prompts and k."""
  runs = documents[name]["runs"]
  ks = sorted({run["k"] for run in runs})
  rows = [
    {run["k"]: run for run in runs if run["group"] == group}
    for group in dict.fromkeys(run["group"] for run in runs)
  ]

  def cell(k: int, row: dict) -> str:
    tokens = estimate(k, "acceptance", "tokens_per_pass")(row)
    return f"{tokens}, {estimate(k, 'speed', 'speedup')(row)}"

  def every(row: dict) -> str:
    return " ".join(dict.fromkeys(map(same, row.values())))

  columns = {
    "prompts": lambda row: row[ks[0]]["group"],
    "texts": lambda row: row[ks[0]]["acceptance"]["texts"],
    "baseline, tokens/s": lambda row: (
      f"{row[ks[0]]['speed']['baseline_tokens_per_second']:.1f}"
    ),
    **{f"k = {k}": partial(cell, k) for k in ks},
    "same text": every,
  }
  return markdown(rows, columns)


def drafters(documents: Mapping, *names: str) -> str:
  """Runs of compare_drafters.py, several documents as one."""
  runs = [run for name in names for run in documents[name]["runs"]]
  return drafter_tables.of_drafters(runs, markdown)


def rules(documents: Mapping, name: str) -> str:
  """Runs of compare_rules.py, and the tree that pays most."""
  document = documents[name]
  parts = document["acceptance_by_rank"], document["tree"]
  caveats = document["caveats"]
  text = tables.of_rules(document["runs"], *parts, caveats, markdown)
  table, *notes = text.split("\n  ")
  return "\n".join([table + "\n" * bool(notes), *(f"- {x}" for x in notes)])


def lossy(documents: Mapping, name: str) -> str:
  """What lossy rules do to a distribution when all accept equally much."""
  return lossy_table.of_equal_length(documents[name]["equal_length"], markdown)


def exact(documents: Mapping, name: str) -> str:
  """Lossless rules on small tables."""
  return lossy_table.of_lossless(documents[name]["exact"], markdown)


def beams(documents: Mapping, name: str) -> str:
  """Widths of beam_search.py, and at which of them drafts lose or gain."""
  entries = documents[name]["beam_searches"]
  notes = []
  for word, sign in (("faster", 1), ("slower", -1)):
    widths = [
      str(x["width"])
      for x in entries
      if sign * (x["speedup"]["value"] - 1) > (x["speedup"]["error"] or 0)
    ]
    if widths:
      widths = ", ".join(widths)
      notes.append(f"- {word} than plain beam search at width {widths}")
  if over := {x["error_over"] for x in entries if "error_over" in x}:
    notes.append(f"- standard errors are over {', '.join(sorted(over))}")
  table = tables.of_beams(entries, markdown)
  return "\n\n".join([table, *filter(None, ["\n".join(notes)])])


def engines(documents: Mapping, name: str) -> str:
  """Tokens/s of specdec and of other engines, from compare_engines.py."""
  first, rest = tables.of_engines(documents[name], markdown).split("\n", 1)
  table, *notes = rest.split("\n  ")
  notes = "\n".join(f"- {note}" for note in notes)
  return "\n\n".join(filter(None, (first, table, notes)))


def best_shapes(documents: Mapping, *names: str) -> str:
  """The fastest chain and the fastest tree of each document, by size."""
  rows = []
  for name in names:
    runs = documents[name]["runs"]
    for nodes in sorted({run["nodes"] for run in runs}):
      kinds = {}
      for run in runs:
        if run["nodes"] == nodes:
          chain = run["comparison"]["shape"] == "chain"
          kinds.setdefault("chain" if chain else "tree", []).append(run)
      best = {kind: max(x, key=speedup_of) for kind, x in kinds.items()}
      rows.append({"of": documents[name], "nodes": nodes, **best})

  def cell(kind: str, row: dict) -> str:
    if kind not in row:
      return ""
    run = row[kind]
    text = str(estimate("speed", "speedup")(run))
    if kind == "tree":
      text += f", {run['comparison']['shape']}"
      if "chain" in row and speedup_of(run) > speedup_of(row["chain"]):
        return f"**{text}**"
    return text

  columns = {
    "temperature": "{[of][settings][temperature]:g}",
    "draft tokens": lambda row: row["nodes"] - 1,
    "chain": partial(cell, "chain"),
    "best tree (bold: ahead of the chain)": partial(cell, "tree"),
  }
  return markdown(rows, columns)


def sweep(documents: Mapping, name: str) -> str:
  """Measured and predicted speedup of every cell, bold outside the band."""
  lines = documents[name]["lines"]
  ks = sorted({line["run"]["k"] for line in lines})

  def cell(k: int, row: dict) -> str:
    if k not in row:
      return ""
    run, predicted = row[k]["run"], row[k]["prediction"]["speedup"]
    text = f"{speedup_of(run):.2f} / {predicted:.2f}"
    return text if 0.9 <= sweeps.ratio(row[k]) <= 1.1 else f"**{text}**"

  parts = []
  for title, group in sweeps.by_setting(lines).items():
    rows: dict[int, dict] = {}
    for line in group:
      rows.setdefault(line["run"]["batch"], {})[line["run"]["k"]] = line
    columns = {"rows": lambda row: next(iter(row.values()))["run"]["batch"]}
    columns |= {f"k = {k}": partial(cell, k) for k in ks}
    text = f"{title}: {sweeps.band(group)}"
    parts.append(f"{text}\n\n{markdown(rows.values(), columns)}")
  parts.append(f"All: {sweeps.band(lines)}.")
  drafted = [line for line in lines if line["run"]["k"]]
  if drafted:
    parts.append(f"Without k = 0: {sweeps.band(drafted)}.")
  failed = documents[name].get("failed", ())
  parts += [f"- failed: {x['point']}: {x['error']}" for x in failed]
  return "\n\n".join(parts)


def leviathan(documents: Mapping, name: str) -> str:
  """A sweep as Leviathan et al.'s tables 2 and 3, prompts by file's name."""
  lines = documents[name]["lines"]
  columns = {
    "task": lambda x: Path(x["point"].get("prompt_file", "")).stem,
    "drafter": "{[drafter]}",
    "T": lambda line: f"{line['point'].get('temperature', 0):g}",
    "k": "{[run][k]}",
    **tables.PREDICTED,
    "measured / by alpha, c": lambda x: tables.number(sweeps.of_formula(x)),
    "measured / predicted": lambda x: f"{sweeps.ratio(x):.2f}",
  }
  ratios = sweeps.formula_ratios(lines)
  text = f"Measured / by alpha, c: {min(ratios):.2f} to {max(ratios):.2f}."
  failed = documents[name].get("failed", ())
  text += "".join(f"\n- failed: {x['point']}: {x['error']}" for x in failed)
  return (
    f"{markdown(lines, columns)}\n\n{text} Measured / predicted: "
    f"{sweeps.band(lines)}."
  )


def printed(documents: Mapping, name: str) -> str:
  """What roofline.py printed: Markdown as it is, else as it stands."""
  text = "\n\n".join(documents[name]["tables"])
  return text if "\n| --- |" in text else f"```\n{text}\n```"


def compiled(documents: Mapping, name: str) -> str:
  """Steps that compile_tpu.py or compile_training.py compiled."""
  document = documents[name]
  parts = document["steps"], document["cost_model"], document["memory"]
  return steps.markdown(*parts)


def calibration(documents: Mapping, name: str) -> str:
  """Fits of bench.py --calibrate."""
  fitted = Calibration.from_json(json.dumps(documents[name]))
  return f"```\n{tables.of_calibration(fitted)}\n```"


def identities(documents: Mapping) -> dict[str, tuple[int, int]]:
  """Returns how many texts were compared with the baseline's, and are equal;
  raises Missing where nothing was."""
  counts = {}
  for name in documents:
    runs = documents[name].get("runs", ())
    some = [x["identity"] for x in runs if x["group"] == "all"]
    if some := [x for x in some if x]:
      counts[name] = tuple(sum(x[y] for x in some) for y in ("texts", "same"))
  if not counts:
    raise Missing("pair_greedy")
  return counts


def identity(documents: Mapping) -> str:
  """Of every measurement, how many texts are autoregressive decoding's."""
  names = "measurement", "comparisons", "equal to the baseline's"
  rows = [(name, *counts) for name, counts in identities(documents).items()]
  return markdown(rows, {x: f"{{[{i}]}}" for i, x in enumerate(names)})


def figure(documents: Mapping, file: str, names: Sequence[str]) -> Figure:
  """Returns the picture of one document, or of several over k; of a sweep the
  file's name says which of its page's figures."""
  if len(names) > 1:
    labels = [name.partition("_")[2] for name in names]
    several = {x: documents[name] for x, name in zip(labels, names)}
    return result_plots.of_documents(several)
  document = documents[names[0]]
  if "lines" in document:
    figures = sweep_page.figures(document["lines"])
    kinds = sorted(figures, key=lambda kind: kind not in file)
    return figures[kinds[0]]
  return result_plots.of_document(document)


TABLES: dict[str, Callable[..., str]] = {
  one.__name__: one
  for one in (
    passes, slots, decoding, groups, drafters, drafter_tables.batches,
    equal_tables.equal, equal_tables.equal_priced, long_contexts, rules, exact,
    lossy, beams, engines, goodput_tables.goodput, mixture_tables.experts,
    mixture_tables.mixture_batches, best_shapes, length_tables.lengths,
    length_tables.priced_lengths, sweep, leviathan, printed, compiled,
    calibration, identity,
  )
}  # fmt: skip
