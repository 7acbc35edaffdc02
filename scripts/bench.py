"""Times passes and decoding, and how near they come to this machine's roof.

  python scripts/bench.py                            # the shipped pair, k = 3
  python scripts/bench.py --k=1-8 --batch=1,4 --temperature=1 \\
    --acceptance=rejection
  python scripts/bench.py --target=smollm2-135m-instruct --exit_layer=20 --k=2
  python scripts/bench.py --nodecode --passes=1-16 --batch=1,2,4   # T(n) alone
  python scripts/bench.py --target=preset:llama3-1b --random_weights \\
    --acceptance=synthetic --rates=0.8 --k=1-8      # speed, and no checkpoint

A pass of n tokens is timed for each n of --passes: T(n). Then the same prompts
are decoded autoregressively and speculatively in turns, each program compiled
and run once before the clock starts; no token ends a text. Prompts are cut to
--context tokens; without --prompt_file they are the 32 held-out Python
functions that come with the package, or random tokens where the target has no
tokenizer; --limit=4 takes fewer of them. This machine's bandwidth is measured
before and after, by reading as many bytes as the weights have; a time that it
forbids is marked in the table. The last line is one JSON document.
"""

import dataclasses
import json
import pathlib
import sys

import _auto
import _calibration
import _decoding
import _flags
import _limit
import _main
import _repeats
import _rows
import jax
from absl import flags
from tqdm import tqdm

from specdec import multihost
from specdec.benchmark import metrics, provenance, results, runs, timing
from specdec.benchmark.decoder import Batch
from specdec.roofline import hardware
from specdec.roofline.cost import pass_bound
from specdec.utils import terminal

_BEFORE = set(flags.FLAGS)
_flags.define_integers(
  "passes", "1,2,4,8,16", "Tokens of the passes timed alone: T(n)."
)
flags.DEFINE_bool("decode", True, "Decode, too; --nodecode for passes alone.")
flags.DEFINE_string(
  "profile",
  None,
  "Folder for a trace of one decoding each way, for XProf or TensorBoard: "
  "pip install xprof, then tensorboard --logdir=FOLDER.",
)
flags.DEFINE_string(
  "calibrate",
  None,
  "Instead of all that: time passes and rounds of these models, fit the cost "
  "model to them, and keep what was found in this file, beside what it holds.",
)
FLAGS = flags.FLAGS
# Or --help would leave them out.
for _module in (_flags, _auto, _limit, _repeats, _rows):
  flags.adopt_module_key_flags(_module)
_OWN = sorted({*FLAGS} - _BEFORE | {*_auto.OWN, "context", "limit", "repeats"})
FLAG_NAMES = [*_flags.SHARED, *_OWN]
_OURS = "speculative"


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  _repeats.settle(9)
  _limit.check_flags()
  for name in ("context", "passes"):
    value = getattr(FLAGS, name)
    least = min(value) if isinstance(value, tuple) else value
    if least < 1:
      raise ValueError(f"--{name}={least}; it must be >= 1")
  if FLAGS.calibrate:
    _main.check_writable("--calibrate", FLAGS.calibrate)
    if FLAGS.shape != "chain":
      raise ValueError(f"--calibrate is of chains, not --shape={FLAGS.shape}")
  if not FLAGS.k:
    if FLAGS.calibrate:
      raise ValueError("--calibrate needs numbers, not --k=auto")
    _auto.check_flags()


def time_passes(models, batch: int, progress) -> list[dict]:
  """T(n) for every n asked for."""
  target = models.target
  found = []
  for n in FLAGS.passes:
    progress.set_postfix_str(f"batch {batch}, a pass of {n}")
    with terminal.progress(f"compiling and timing a pass of {batch} x {n}"):
      taken = timing.time_pass(
        models.target_model,
        models.target.params,
        batch,
        n,
        FLAGS.context,
        FLAGS.context + FLAGS.max_new_tokens + n,  # as decoding has them
        FLAGS.repeats,
      )
    shape = target.config, batch, n, FLAGS.context
    size, arithmetic = pass_bound(*shape)
    found.append(
      {
        "batch": batch,
        "tokens": n,
        "context": FLAGS.context,
        "seconds": dataclasses.asdict(taken),
        "bytes": size,
        "bytes_per_second": size / taken.median,
        "flops": arithmetic,
        "flops_per_second": arithmetic / taken.median,
        "warnings": [],
      }
    )
    progress.update()
  return found


def decode(models, k: int, prompts: _rows.Batches, baseline, progress):
  """One point: speculation with k against the baseline.

  Args:
    baseline: that of this batch size, None if it is not compiled yet.

  Returns:
    Its document, and the compiled baseline.
  """
  rows, batch = prompts.rows, len(prompts.rows[0])
  batches = [
    Batch(some, range(i * batch, (i + 1) * batch))
    for i, some in enumerate(rows)
  ]
  decoder = _decoding.make_decoder(models, k, batch, FLAGS.context, ())
  with terminal.progress(f"compiling batch {batch}, k = {k}"):
    if baseline is None:
      baseline = decoder.baseline()
      baseline.compile()
    with timing.compilations() as compiled:
      compile_seconds = decoder.compile()
    decoders = {_OURS: decoder, runs.BASELINE: baseline}
    for one in decoders.values():
      one.warm_up(rows[0])
  runs.compare(decoders, batches[:1])  # discarded
  progress.set_postfix_str(f"batch {batch}, k = {k}")
  if FLAGS.profile:
    with jax.profiler.trace(FLAGS.profile):
      runs.compare(decoders, batches[:1])
  # What compiles now and then (a collected program, another thread's) may
  # spoil one series of timings, not two.
  for _ in range(2):
    with timing.compilations() as late:
      comparison = runs.compare(
        decoders,
        batches,
        _repeats.turns(len(rows)),
        progress=progress.update,
      )
    if not (count := int(multihost.agree(late.count))):
      break
  seconds, baseline_seconds = (
    [one.seconds for one in comparison.of(name)] for name in decoders
  )
  speed = None
  if len(rows) == 1:
    speed = metrics.median_speed(
      sum(map(len, comparison.texts(_OURS))),
      seconds,
      baseline_seconds,
      *(
        [one.prefill_seconds for one in comparison.of(name)]
        for name in decoders
      ),
    )
  run = comparison.run(_OURS, k, _decoding.comparable(), speed)
  document = {
    **run.document(),
    "context": prompts.shortest,
    "prompts": prompts.source,
    "rounds": sum(one.num_rounds for one in comparison.distinct(_OURS)),
    "least_round_seconds": _least_round(comparison, _OURS),
    "least_baseline_round_seconds": _least_round(comparison, runs.BASELINE),
    "seconds": dataclasses.asdict(timing.timing(seconds)),
    "baseline_seconds": dataclasses.asdict(timing.timing(baseline_seconds)),
    "acceptance_seconds": dataclasses.asdict(
      timing.time_acceptance(decoder, FLAGS.repeats)
    ),
    "compile": {
      "seconds": compile_seconds,
      "backend_seconds": compiled.seconds,
      "programs": compiled.count,
    },
    "memory": timing.loop_memory(decoder),
    "baseline_memory": timing.loop_memory(baseline),
    "warnings": [],
  }
  if count:
    document["warnings"].append(
      f"{count} programs compiled while batch {batch} x {k} was timed"
    )
  return document, baseline


def _least_round(comparison: runs.Comparison, name: str) -> float:
  """Returns the seconds of a round, of the batch where they were fewest."""
  return min(one.seconds / one.num_rounds for one in comparison.of(name))


def impossible(
  document, target, bandwidth: float
) -> list[tuple[dict, str, bool]]:
  """Times that this machine's bandwidth forbids.

  Returns:
    For each the entry that it belongs to, a sentence, and whether it is grossly
    wrong.
  """
  found = []

  def check(entry, what: str, seconds: float, batch: int, tokens: int) -> None:
    size = pass_bound(target.config, batch, tokens, entry["context"]).bytes
    try:
      if said := timing.check_possible(what, seconds, size, bandwidth):
        found.append((entry, said, False))
    except timing.Impossible as error:
      found.append((entry, str(error), True))

  for entry in document["passes"]:
    batch, tokens = entry["batch"], entry["tokens"]
    what = f"a pass of {batch} x {tokens} tokens"
    check(entry, what, entry["seconds"]["least"], batch, tokens)
  for run in document["runs"]:
    rounds = run["least_round_seconds"]
    where = f"of batch {run['batch']}, k = {run['k']}"
    check(run, f"a round {where}", rounds, run["batch"], run["nodes"])
    rounds = run["least_baseline_round_seconds"]
    check(run, f"a baseline round {where}", rounds, run["batch"], 1)
  return found


def print_machine(document) -> None:
  """Where this was measured, and what that machine can do."""
  machine = document["hardware"]
  products = ", ".join(
    f"{dtype} {rate / 1e9:.0f}" for dtype, rate in machine["flops"].items()
  )
  terminal.report(
    f"{machine['name']}, load {document['machine']['load']} before and "
    f"{document['load_after']} after; {FLAGS.target}, {FLAGS.dtype}, context "
    f"{FLAGS.context}\n"
    f"reads {document['bandwidth'] / 1e9:.1f} GB/s at the weights' size, now; "
    f"large products, 10^9 operations/s on {machine['date']}: {products}"
  )


def print_tables(document) -> None:
  """What a person wants to read."""
  if document["passes"]:
    terminal.report("\na pass of n tokens a row")
    terminal.report(results.of_passes(document["passes"]))
  if document["runs"]:
    terminal.report(
      f"\ndecoding, {_decoding.describe_drafter()}, {FLAGS.acceptance}"
    )
    for source in dict.fromkeys(run["prompts"] for run in document["runs"]):
      terminal.report(f"  {source}")
    for caveat in document["caveats"]:
      terminal.report(f"  warning: {caveat}")
    terminal.report(results.of_bench(document["runs"]))


def calibrate(models) -> None:
  """Writes --calibrate, and says how well the cost model explains the times."""
  path = pathlib.Path(FLAGS.calibrate)
  base = _calibration.read(path)
  batches = sorted({1, (max(FLAGS.batch) + 1) // 2, max(FLAGS.batch)})
  ks = {2, 5, max(*FLAGS.k, 1)}
  most = models.learned and models.learned.head_config.most_levels
  ks = sorted({min(k, most or k) for k in ks})
  rows = _rows.make_rows(models.target, max(batches), FLAGS.context)
  context = FLAGS.context + FLAGS.max_new_tokens + max(ks)
  found = _calibration.timed(
    models, rows, FLAGS.context, batches, ks, context, base, FLAGS.repeats
  )
  _calibration.write(path, found)
  terminal.report(_calibration.describe(found))


def bench() -> None:
  """The whole run."""
  FLAGS.compilation_cache = ""  # compilation is timed
  _flags.settle(_OWN, auto=True)
  check_flags()
  jax.config.update("jax_enable_compilation_cache", False)
  header = _decoding.header(_OWN)
  machine = hardware.local(
    progress=lambda what: terminal.report(what, file=sys.stderr)
  )
  models = _decoding.load(FLAGS.context + FLAGS.max_new_tokens)
  if FLAGS.calibrate:
    return calibrate(models)
  target = models.target
  rows = {
    batch: _rows.make_batches(target, batch, FLAGS.context, FLAGS.limit)
    for batch in FLAGS.batch
  }
  before = timing.bandwidth_of(target.params)
  passes, entries = [], []
  total = len(FLAGS.batch) * len(FLAGS.passes)
  if FLAGS.decode:
    pairs = (len(r.rows) * _repeats.turns(len(r.rows)) for r in rows.values())
    total += max(1, len(FLAGS.k)) * sum(pairs)
  with tqdm(total=total, disable=not sys.stderr.isatty()) as progress:
    for batch in FLAGS.batch:
      passes += time_passes(models, batch, progress)
      baseline = None
      ks = FLAGS.k
      if FLAGS.decode and not ks:
        chosen = _auto.choose(models, rows[batch].rows[0], batch)
        progress.write(_auto.explain(chosen, batch))
        ks = (chosen.k,)
      for k in ks if FLAGS.decode else ():
        run, baseline = decode(models, k, rows[batch], baseline, progress)
        entries.append(run)
  bandwidth = max(before, timing.bandwidth_of(target.params))
  peak = machine.flops.get(FLAGS.dtype)
  if models.places:  # of all devices together
    devices = models.places.target.mesh.size
    bandwidth, peak = bandwidth * devices, peak and peak * devices
  for entry in passes:
    compute = entry["flops"] / peak if peak else 0.0
    entry["roof_seconds"] = max(entry["bytes"] / bandwidth, compute)
  document = header | {
    "runs": entries,
    "passes": passes,
    "bandwidth": bandwidth,
    "hardware": dataclasses.asdict(machine),
    "peak_memory": timing.peak_memory(),
    "load_after": provenance.load(),
  }
  wrong = impossible(document, target, bandwidth)
  if wrong:  # or was the machine busy both times that it was measured?
    document["bandwidth"] = max(bandwidth, timing.bandwidth_of(target.params))
    wrong = impossible(document, target, document["bandwidth"])
  document["impossible"] = [sentence for _, sentence, _ in wrong]
  for entry, sentence, _ in wrong:
    entry["warnings"].append(sentence)
  print_machine(document)
  print_tables(document)
  if FLAGS.json:
    results.write_json(FLAGS.json, document)
  terminal.report(json.dumps(document, allow_nan=False))
  for _, sentence, gross in wrong:
    if gross:
      raise timing.Impossible(sentence)


main = _main.main_of("bench", bench, also=(timing.Impossible,))

if __name__ == "__main__":
  _main.start(main)
