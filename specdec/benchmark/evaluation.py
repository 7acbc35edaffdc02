"""Files of prompts decoded both ways, batch by batch, and summed by group.

Invariant: a batch is of one group and one shape, so its time belongs to the
group; what is kept of it is one line of JSON that says everything.
"""

from collections.abc import Sequence

import numpy as np

from specdec.benchmark import metrics, results
from specdec.benchmark.session import Session
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
  sessions: dict[int, Session],
  rows: Sequence[Sequence[int]],
  members: Sequence[int],
  turn: int,
  comparable: bool,
) -> dict:
  """Decodes autoregressively, once, and with every k; the line to keep.

  Args:
    sessions: by k, of one shape.
    rows: token ids of the prompts.
    members: their numbers, which name their noise.
    turn: says when it is autoregressive decoding's turn, so that it is not
      always the first or the last.
    comparable: whether texts should equal autoregressive decoding's.
  """
  ways = list(sessions)
  ways.insert(turn % (len(ways) + 1), None)
  any_session = next(iter(sessions.values()))
  done = {
    k: sessions.get(k, any_session).complete(
      rows, members, baseline=k is None, strict=False
    )
    for k in ways
  }
  baseline = done[None]

  def counted(k: int) -> dict:
    ours = done[k]
    differences = []
    if comparable:
      differences = [
        sessions[k].first_difference(row, a, b, i)
        for row, i, a, b in zip(rows, members, ours.texts, baseline.texts)
        if a != b
      ]
    return {
      "k": k,
      "nodes": sessions[k].drafter.spec.max_nodes,
      "tokens": sum(map(len, ours.texts)),
      "seconds": ours.seconds,
      "prefill_seconds": ours.prefill_seconds,
      "stats": {
        name: np.asarray(value).tolist()
        for name, value in vars(ours.stats).items()
      },
      "differences": differences,
    }

  faults = [fault for found in done.values() for fault in found.faults]
  return {
    "prompts": list(members),
    "faults": list(dict.fromkeys(faults)),
    "baseline_tokens": sum(map(len, baseline.texts)),
    "baseline_seconds": baseline.seconds,
    "baseline_prefill_seconds": baseline.prefill_seconds,
    "runs": [counted(k) for k in sessions],
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
  """These lines' runs number `place`."""
  runs = [line["runs"][place] for line in lines]
  stats = [
    Stats(**{name: np.array(x) for name, x in run["stats"].items()})
    for run in runs
  ]
  texts = sum(len(line["prompts"]) for line in lines)
  differences = tuple(d for run in runs for d in run["differences"])
  return results.Run(
    group,
    runs[0]["k"],
    runs[0]["nodes"],
    batch,
    metrics.acceptance(stats),
    metrics.speed(
      [run["tokens"] for run in runs],
      [run["seconds"] for run in runs],
      [line["baseline_tokens"] for line in lines],
      [line["baseline_seconds"] for line in lines],
      [run["prefill_seconds"] for run in runs],
      [line["baseline_prefill_seconds"] for line in lines],
    ),
    results.Identity(texts, texts - len(differences), differences)
    if comparable
    else None,
  )
