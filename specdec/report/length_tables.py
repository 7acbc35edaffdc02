"""Tables of how a batch's drafts get their length: measured, and priced."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from specdec.report import goodput_tables, tables
from specdec.report.tables import estimate, markdown, speedup_of


def lengths(documents: Mapping, *names: str) -> str:
  """Speedups by batch: of every fixed k, and of drafts that find their length,
  in measurements of bench.py with --length."""
  runs = [run for name in names for run in documents[name]["runs"]]
  headings = [run.get("length", f"k = {run['k']}") for run in runs]
  return _by_batch(zip(headings, runs), markdown)


def priced_lengths(documents: Mapping, name: str) -> str:
  """The same of table models, load by load, as roofline.py prices them."""
  return priced(documents[name]["lengths"], markdown)


def priced(entries: Sequence[dict], form=tables.listed) -> str:
  """Formats entries of `benchmark.priced_lengths.compare`."""
  parts = []
  for load in dict.fromkeys(entry["load"] for entry in entries):
    runs = [(x["way"], x) for x in entries if x["load"] == load]
    parts.append(f"Acceptance {load}:\n\n{_by_batch(runs, form)}")
  return "\n\n".join(parts)


def _by_batch(runs: Iterable[tuple[str, dict]], form: Callable) -> str:
  """Formats runs, a row for each batch and a column for each way; the fastest
  is bold."""
  rows, columns = {}, {"rows": "{[batch]}"}

  def cell(heading: str, row: dict) -> str:
    text = str(estimate("speed", "speedup")(row[heading]))
    ways = (x for x in row if x != "batch")
    best = max(ways, key=lambda x: speedup_of(row[x]))
    return f"**{text}**" if heading == best else text

  for heading, run in runs:
    row = rows.setdefault(run["batch"], {"batch": run["batch"]})
    row[heading] = run
    columns[heading] = functools.partial(cell, heading)
  table = form(rows.values(), columns)
  decided = [row for row in rows.values() if "adaptive" in row]
  return f"{table}\n\n{_where_short(decided)}" if decided else table


def _where_short(rows: Sequence[dict]) -> str:
  """Says at which batches `adaptive` loses, or gains less than a number."""
  lost, short = [], []
  for row in rows:
    speedup = speedup_of(row["adaptive"])
    numbers = [
      speedup_of(run) for k, run in row.items() if k.startswith("k = ")
    ]
    if speedup < goodput_tables.LEAST:
      lost.append(str(row["batch"]))
    if speedup < goodput_tables.NEAR * max(numbers, default=0.0):
      short.append(str(row["batch"]))
  lost, short = (", ".join(x) or "none" for x in (lost, short))
  return (
    f"- adaptive under {goodput_tables.LEAST} times decoding alone, rows: "
    f"{lost}\n- under {goodput_tables.NEAR} times the best number's, rows: "
    f"{short}"
  )
