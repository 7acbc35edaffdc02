"""Decodes files of prompts, interleaved with the baseline, and sums by group.

Invariant: a batch is of one group and one shape, so its time belongs to the
group; what is kept of it is one line of JSON that says everything.
"""

import functools
from collections.abc import Sequence

import numpy as np

from specdec.benchmark import metrics, results, runs
from specdec.benchmark.decoder import Batch, Decoder
from specdec.benchmark.prompts import Corpus
from specdec.types import Stats

_SMALLEST = 256  # tokens of the smallest prompt buffer; others double it


def buffer_size(length: int = 0) -> int:
  """P of the smallest of few prompt buffers that holds so many tokens."""
  size = _SMALLEST
  while size < length:
    size *= 2
  return size


def plan(
  encoded: Sequence[Sequence[int]], groups: Sequence[str], batch: int
) -> list[tuple[int, list[int]]]:
  """(P, indices of the prompts) of every batch, those of one P together.

  Args:
    encoded: token ids of each prompt.
    groups: what each is counted under.
  """
  kinds = {}
  for i, (ids, group) in enumerate(zip(encoded, groups)):
    kinds.setdefault((buffer_size(len(ids)), group), []).append(i)
  return [
    (size, members[first : first + batch])
    for (size, _), members in sorted(kinds.items())
    for first in range(0, len(members), batch)
  ]


def decode_batch(
  decoders: dict[int, Decoder],
  baseline: Decoder,
  batch: Batch,
  turn: int,
  comparable: bool,
) -> dict:
  """Decodes a batch in every way once; returns its line of JSON.

  Args:
    decoders: by k, of one shape.
    turn: number of the batch; it rotates who goes first.
    comparable: whether texts should equal the baseline's.
  """
  ways = {
    name: functools.partial(way.complete, strict=False)
    for name, way in {**decoders, runs.BASELINE: baseline}.items()
  }
  [done] = runs.interleave(ways, [batch], first_turn=turn)
  baseline_texts = done[runs.BASELINE].texts

  def counted(k: int) -> dict:
    completed, differences = done[k], []
    if comparable:
      differences = [
        decoders[k].first_difference(row, text, other, number)
        for row, number, text, other in zip(
          batch.rows, batch.numbers, completed.texts, baseline_texts
        )
        if text != other
      ]
    return {
      "k": k,
      "nodes": decoders[k].num_nodes,
      "tokens": completed.num_tokens,
      "seconds": completed.seconds,
      "prefill_seconds": completed.prefill_seconds,
      "stats": {
        name: np.asarray(value).tolist()
        for name, value in vars(completed.stats).items()
      },
      "differences": differences,
    }

  faults = [fault for one in done.values() for fault in one.faults]
  return {
    "prompts": list(batch.numbers),
    "faults": list(dict.fromkeys(faults)),
    "baseline_tokens": done[runs.BASELINE].num_tokens,
    "baseline_seconds": done[runs.BASELINE].seconds,
    "baseline_prefill_seconds": done[runs.BASELINE].prefill_seconds,
    "runs": [counted(k) for k in decoders],
  }


def sum_up(
  lines: Sequence[dict], groups: Sequence[str], batch: int, comparable: bool
) -> list[results.Run]:
  """A run for every group, in the order of the prompts, then for all; and k.

  Groups of which no token was decoded are left out.

  Args:
    lines: of `decode_batch`, all with the same ks.
    groups: by number of the prompt.

  Raises:
    ValueError: not one token was decoded.
  """
  faults = [fault for line in lines for fault in line.get("faults", ())]
  lines = [
    line
    for line in lines
    if line["baseline_tokens"] and all(run["tokens"] for run in line["runs"])
  ]
  if not lines:
    raise ValueError(faults[0])
  kept = {groups[line["prompts"][0]] for line in lines}
  return [
    _run(
      [x for x in lines if group in ("all", groups[x["prompts"][0]])],
      place,
      group,
      batch,
      comparable,
    )
    for group in [*(g for g in dict.fromkeys(groups) if g in kept), "all"]
    for place in range(len(lines[0]["runs"]))
  ]


def _run(lines, place, group, batch, comparable) -> results.Run:
  """Sums up these lines' runs number `place`."""
  parts = [line["runs"][place] for line in lines]
  stats = [
    Stats(**{name: np.array(x) for name, x in run["stats"].items()})
    for run in parts
  ]
  texts = sum(len(line["prompts"]) for line in lines)
  differences = tuple(d for run in parts for d in run["differences"])
  return results.Run(
    group,
    parts[0]["k"],
    parts[0]["nodes"],
    batch,
    metrics.acceptance(stats),
    metrics.speed(
      [run["tokens"] for run in parts],
      [run["seconds"] for run in parts],
      [line["baseline_tokens"] for line in lines],
      [line["baseline_seconds"] for line in lines],
      [run["prefill_seconds"] for run in parts],
      [line["baseline_prefill_seconds"] for line in lines],
    ),
    results.Identity(texts, texts - len(differences), differences)
    if comparable
    else None,
  )


def document(
  header: dict,
  runs: Sequence[results.Run],
  lines: Sequence[dict],
  corpus: Corpus,
) -> dict:
  """Returns what a document of eval.py says beside its header.

  Args:
    lines: of every batch, with its date and load.
  """
  loads = [line["load"] for line in lines if line["load"] is not None]
  faults = [fault for line in lines for fault in line.get("faults", ())]
  return {
    "caveats": [*header["caveats"], *faults],
    "runs": [run.document() for run in runs],
    "measured": {
      "first": min(line["date"] for line in lines),
      "last": max(line["date"] for line in lines),
      "highest_load": max(loads, default=None),
    },
    "broken_lines": corpus.broken,
    "too_long": corpus.too_long,
  }
