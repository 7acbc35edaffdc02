"""Goodput under loads: ways of decoding that serve the same queues in turns.

A load is the rate at which prompts arrive over the rate that the autoregressive
baseline answers them at when all are there from the beginning, a load of
infinity. That is measured first; filling and emptying its rows is part of it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specdec.benchmark import metrics, runs, timing
from specdec.benchmark.queues import Served, Server, requests_of
from specdec.benchmark.runs import BASELINE

_SHARES = 0.5, 0.9, 0.99  # of latencies
LEAST_LOAD = 1e-3  # prompts would wait for each other for ages


def check_loads(loads: Sequence[float]) -> None:
  """Refuses loads that are none, or below a thousandth."""
  if not loads:
    raise ValueError("give at least one load")
  for load in loads:
    if not load >= LEAST_LOAD:
      raise ValueError(
        f"a load of {load:g}; it must be >= {LEAST_LOAD}, or inf"
      )


def compare(
  servers: Mapping[str, Server],
  prompts: Sequence[Sequence[int]],
  loads: Sequence[float],
  count: int,
  repeats: int,
  least: int | None = None,
  seed: int = 0,
  comparable: bool = False,
) -> Iterator[list[dict]]:
  """Yields for every load an entry of each way, the baseline first.

  The same requests arrive at the same times in every way and repeat. A machine
  whose speed drifts drifts under all ways alike.

  Args:
    servers: by name, of batches of one shape; one is BASELINE.
    count, least, seed: as `requests_of` takes them, and how many.
    repeats: how often each load is served in each way.
    comparable: texts should equal the baseline's: counts those that do.
  """
  check_loads(loads)
  plain = servers[BASELINE]
  most = plain.decoder.max_new_tokens
  given = prompts, count, most, least
  everything = requests_of(*given, seed=seed)
  for server in servers.values():
    server.check(everything)
  first = {}  # not timed but for capacity: a width's first pass takes longer
  for name, server in servers.items():
    server.warm_up(prompts)
    first[name] = server.serve(everything)
  capacity = len(first[BASELINE].answers) / first[BASELINE].seconds

  ways = {name: server.serve for name, server in servers.items()}
  for load in loads:
    rate = None if math.isinf(load) else load * capacity
    requests = requests_of(*given, rate=rate, seed=seed)
    with timing.compilations() as late:
      results = [*runs.interleave(ways, [requests], repeats)]
    warnings = []
    if late.count:
      warnings.append(f"{late.count} programs compiled while it was timed")
    shared = {
      "load": None if rate is None else load,
      "requests_per_second": rate,
      "capacity": capacity,
      "warnings": warnings,
    }
    yield [
      shared | _entry(name, servers[name], results, comparable)
      for name in [BASELINE, *(x for x in servers if x != BASELINE)]
    ]


def _entry(
  name: str, server: Server, results: Sequence[Mapping], comparable: bool
) -> dict:
  """Sums up one way at one load, over repeats."""
  ours, plain = ([one[x] for one in results] for x in (name, BASELINE))
  same = None
  if comparable and name != BASELINE:
    same = sum(a == b for a, b in zip(ours[0].texts, plain[0].texts))
  answers = [one for served in ours for one in served.answers]
  quotients = [a.goodput / b.goodput for a, b in zip(ours, plain)]
  faster = [_latency(b) / _latency(a) for a, b in zip(ours, plain)]
  return {
    "name": name,
    "batch": server.decoder.batch,
    "k": server.decoder.drafter.spec.max_depth,
    "nodes": server.decoder.num_nodes,
    "requests": len(ours[0].answers),
    "repeats": len(ours),
    "goodput": dataclasses.asdict(metrics.mean([one.goodput for one in ours])),
    "speedup": dataclasses.asdict(metrics.geometric_mean(quotients)),
    "latency": _spread([one.latency for one in answers]),
    "first_token": _spread([one.first_latency for one in answers]),
    "latency_speedup": dataclasses.asdict(metrics.geometric_mean(faster)),
    "occupancy": float(np.mean([one.occupancy for one in ours])),
    "rounds": ours[0].rounds,
    "refills": ours[0].refills,
    "tokens": ours[0].num_tokens,
    "seconds": [one.seconds for one in ours],
    "same_texts": same,
    "acceptance": dataclasses.asdict(
      metrics.acceptance([one.stats for one in ours[0].answers])
    ),
  }


def _latency(served: Served) -> float:
  return float(np.mean([one.latency for one in served.answers]))


def _spread(seconds: Sequence[float]) -> dict[str, float]:
  """Mean and quantiles of latencies in seconds."""
  quantiles = np.quantile(seconds, _SHARES).tolist()
  names = (f"p{100 * share:g}" for share in _SHARES)
  return {"mean": float(np.mean(seconds)), **dict(zip(names, quantiles))}
