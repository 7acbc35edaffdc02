"""Measures one point: passes of n tokens, and decoding against the baseline.

A time that the machine's bandwidth forbids is marked: it was not measured, or
the machine was busy while its bandwidth was.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from specdec import multihost
from specdec.benchmark import metrics, runs, timing
from specdec.benchmark.batches import Completed
from specdec.benchmark.rows import Batches
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.compiled import memory_plan
from specdec.models.config import TransformerConfig
from specdec.roofline.cost import pass_bound
from specdec.roofline.hardware import Hardware
from specdec.utils import terminal


def time_passes(
  setup: Setup,
  target: Target,
  passes: Sequence[int],
  context: int,
  repeats: int,
  slots: Sequence[int] = (),
) -> list[dict]:
  """Times passes of so many tokens a row after a context: T(n).

  They are timed in turns, and between them the memory's bandwidth.

  Args:
    slots: of the KV cache, each pass with each; default as decoding has them.

  Raises:
    MemoryError: their caches, one for each, do not fit.
  """
  checkpoint, timers = target.checkpoint, []
  usual = context + setup.max_new_tokens
  shapes = [
    (setup.batch, tokens, context, size)
    for tokens in passes
    for size in slots or (usual + tokens,)
  ]
  place = target.places and target.places.target
  caches = sum(
    memory_plan.cache_bytes(checkpoint.config, setup.batch, size, place)
    for *_, size in shapes
  )
  memory_plan.check(memory_plan.Plan({"KV caches of passes": caches}), place)
  for shape in shapes:
    with terminal.progress(f"compiling a pass of {shape[0]} x {shape[1]}"):
      timers.append(timing.pass_timer(target.model, checkpoint.params, *shape))
  with terminal.progress(f"timing {len(passes)} passes of batch {setup.batch}"):
    turns = timing.time_passes(timers, checkpoint.params, repeats)
  entries = []
  for shape, row in zip(shapes, turns.seconds):
    size, arithmetic = pass_bound(checkpoint.config, *shape[:3])
    seconds = timing.timing(row)
    first = metrics.geometric_mean(row / turns.seconds[0])
    share = metrics.geometric_mean(size / (turns.rates * row))
    entry = {
      **dict(zip(("batch", "tokens", "context", "slots"), shape)),
      "seconds": dataclasses.asdict(seconds),
      "bytes": size,
      "bytes_per_second": size / seconds.median,
      "times_first": dataclasses.asdict(first),
      "bandwidth": float(np.median(turns.rates)),
      "bandwidth_share": dataclasses.asdict(share),
      "flops": arithmetic,
      "flops_per_second": arithmetic / seconds.median,
      "warnings": [],
    }
    entries.append(entry)
  return entries


def measure(
  named: Sequence[tuple[str | None, Setup]],
  target: Target,
  prompts: Batches,
  repeats: int,
  profile: str | None = None,
  progress: Callable[[], object] | None = None,
  runs_prompts: bool = True,
) -> list[dict]:
  """Times decoding of setups of one batch size and of their baseline, in turns;
  returns each point's document.

  Args:
    named: setups, and what decided how much each drafts; None: its k.
    repeats: timings of each, at least.
    profile: folder for a trace of one decoding each way.
    progress: called after each batch.
    runs_prompts: False: begins after positions that hold nothing.
  """
  batches, ways = prompts.batches, {}
  for length, setup in named:
    decoder = setup.decoder(target).for_timing(runs_prompts)
    k = decoder.drafter.spec.max_depth if setup.k is None else setup.k
    name = length or f"k = {k}"
    what = f"compiling batch {setup.batch}, {name}"
    with terminal.progress(what), timing.compilations() as compiled:
      seconds = decoder.compile()
    document = {
      "compile": {
        "seconds": seconds,
        "backend_seconds": compiled.seconds,
        "programs": compiled.count,
      }
    }
    if length:
      document["length"] = length.partition(", k = ")[0]
    ways[name] = setup, k, decoder, document
  decoders = {name: decoder for name, (_, _, decoder, _) in ways.items()}
  baseline = next(iter(decoders.values())).baseline()
  decoders[runs.BASELINE] = baseline
  runs.compare(decoders, batches[:1])  # warms up; discarded
  if profile:
    runs.trace(profile, decoders, batches[0])
  turns = -(-repeats // len(batches))
  # What compiles now and then (a collected program, another thread's) may
  # spoil one series of timings, not two.
  for _ in range(2):
    with timing.compilations() as late:
      comparison = runs.compare(decoders, batches, turns, progress=progress)
    if not (count := int(multihost.agree(late.count))):
      break
  documents = []
  for name, (setup, k, decoder, document) in ways.items():
    speed = _median_speed(comparison, name)
    run = comparison.run(name, k, setup.comparable, speed)
    warnings = []
    if count:
      warnings.append(
        f"{count} programs compiled while batch {setup.batch} x {k} was timed"
      )
    documents.append({
      **run.document(),
      "context": prompts.shortest,
      "prompts": prompts.description,
      "rounds": sum(one.num_rounds for one in comparison.distinct(name)),
      **_times_of(comparison.of(name), ""),
      **_times_of(comparison.of(runs.BASELINE), "baseline_"),
      "acceptance_seconds": dataclasses.asdict(
        timing.time_acceptance(decoder, repeats)
      ),
      **document,
      "memory": timing.loop_memory(decoder),
      "baseline_memory": timing.loop_memory(baseline),
      "warnings": warnings,
    })  # fmt: skip
  return documents


def measure_all(
  setup: Setup,
  target: Target,
  prompts: Mapping[int, Batches],
  passes: Sequence[int],
  setups: Mapping[int, Sequence[tuple[str | None, Setup]]],
  repeats: int,
  profile: str | None = None,
  slots: Sequence[int] = (),
  runs_prompts: bool = True,
) -> dict[str, list[dict]]:
  """Times passes and decoding of every batch size, as entries of a document.

  Args:
    setup: prompt_size is the context after which passes are timed.
    prompts, setups: by batch size; setups of that size as `measure` has them.
  """
  timed, entries, context = [], [], setup.prompt_size
  total = len(prompts) * bool(passes)
  for batch, some in prompts.items():
    if setups[batch]:
      total += len(some.batches) * -(-repeats // len(some.batches))
  with tqdm(total=total, disable=not sys.stderr.isatty()) as progress:
    for batch, some in prompts.items():
      setup = dataclasses.replace(setup, batch=batch)
      if passes:
        progress.set_postfix_str(f"batch {batch}, passes")
        timed += time_passes(setup, target, passes, context, repeats, slots)
        progress.update()
      if named := setups[batch]:
        progress.set_postfix_str(f"batch {batch}")
        entries += measure(
          named, target, some, repeats, profile, progress.update, runs_prompts
        )
  return {"runs": entries, "passes": timed}


def _median_speed(
  comparison: runs.Comparison, name: str
) -> metrics.Speed | None:
  """Returns one way's speed by medians over repeats; None: several batches, or
  it writes more or fewer tokens than the baseline."""
  sizes = (sum(map(len, comparison.texts(x))) for x in (name, runs.BASELINE))
  if len(comparison.batches) > 1 or len({*sizes}) > 1:
    return None
  times = [
    [getattr(one, column) for one in comparison.of(way)]
    for column in ("seconds", "prefill_seconds")
    for way in (name, runs.BASELINE)
  ]
  tokens = sum(map(len, comparison.texts(name)))
  return metrics.median_speed(tokens, *times)


def _times_of(completed: Sequence[Completed], prefix: str) -> dict:
  """Returns a point's seconds, and those of the fastest batch's rounds."""
  seconds = timing.timing([one.seconds for one in completed])
  least = min(one.seconds / one.num_rounds for one in completed)
  return {
    f"{prefix}seconds": dataclasses.asdict(seconds),
    f"least_{prefix}round_seconds": least,
  }


def _faults(
  document: dict, config: TransformerConfig, bandwidth: float
) -> list[tuple[dict, str, bool]]:
  """Returns times that a bandwidth forbids: their entry, a sentence, and
  whether they are grossly wrong."""
  times = []
  for entry in document["passes"]:
    tokens = entry["tokens"]
    what = f"a pass of {entry['batch']} x {tokens} tokens"
    times.append((entry, what, entry["seconds"]["least"], tokens))
  for run in document["runs"]:
    what = f"round of batch {run['batch']}, k = {run['k']}"
    least, tokens = run["least_round_seconds"], run["nodes"]
    times.append((run, f"a {what}", least, tokens))
    least = run["least_baseline_round_seconds"]
    times.append((run, f"a baseline {what}", least, 1))
  faults = []
  for entry, what, seconds, tokens in times:
    shape = config, entry["batch"], tokens, entry["context"]
    size = pass_bound(*shape).bytes
    try:
      if sentence := timing.check_possible(what, seconds, size, bandwidth):
        faults.append((entry, sentence, False))
    except timing.Impossible as error:
      faults.append((entry, str(error), True))
  return faults


def check_times(
  document: dict, setup: Setup, target: Target, machine: Hardware
) -> list[str]:
  """Adds roofs and warnings to a document's entries; returns a sentence for
  every time that is grossly wrong."""
  config, params = target.checkpoint.config, target.checkpoint.params
  peak, devices = machine.flops.get(setup.dtype), 1
  if target.places:  # all devices together
    devices = target.places.target.mesh.size
  document["bandwidth"] *= devices
  for entry in document["passes"]:
    entry["bandwidth"] *= devices
    share = entry["bandwidth_share"]
    for name in ("value", "error"):
      share[name] = share[name] and share[name] / devices
    document["bandwidth"] = max(document["bandwidth"], entry["bandwidth"])
  for entry in document["passes"]:
    compute = entry["flops"] / (peak * devices) if peak else 0.0
    memory = entry["bytes"] / document["bandwidth"]
    entry["roof_seconds"] = max(memory, compute)
  faults = _faults(document, config, document["bandwidth"])
  if faults:  # or was the machine busy both times that it was measured?
    again = devices * timing.bandwidth_of(params)
    document["bandwidth"] = max(document["bandwidth"], again)
    faults = _faults(document, config, document["bandwidth"])
  document["impossible"] = [sentence for _, sentence, _ in faults]
  for entry, sentence, _ in faults:
    entry["warnings"].append(sentence)
  return [sentence for _, sentence, gross in faults if gross]
