"""Predicts what speculation gains, from datasheets or a calibrated machine.

  python scripts/roofline.py                        # Llama 3 70B + 1B on v5p:4
  python scripts/roofline.py --chip=h100 --target=llama3-8b --draft=llama3-1b \\
    --alpha=0.8 --output=runs/roofline
  python scripts/roofline.py --chip=v6e --ways=8 --target=llama3-70b \\
    --weights=int8 --context=32768 --prefix_acceptance=0.8,0.66,0.55,0.47
  python scripts/roofline.py --calibration=calibration.json \\
    --target=stdlib-11m --draft=stdlib-1m --alpha=0.85
  python scripts/roofline.py --papers         # the founding papers' tables

Prints what a round costs term by term, the best k for every batch and context,
where speculation stops paying, the gain at equal memory, and schedules for
engines. With --output it writes pictures (speedup over k and batch, k and
context, k and draft size, k and acceptance; chips side by side; the roofline)
and cells.csv.
"""

import json
import sys
from pathlib import Path

import _config
import _main
import _output
import _priced
import _roofline_pictures
import numpy as np
from _priced import gain
from absl import flags

from specdec.report import papers
from specdec.roofline import chips, planning, prediction, theory
from specdec.roofline.calibration import Calibration
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import terminal
from specdec.utils.terminal import columns

FLAGS = flags.FLAGS
for _module in (_priced, _output):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)


def apply_config() -> None:
  """Sets flags from --config, except those given on the command line."""
  for name, value in (FLAGS.config or {}).items():
    if name not in _priced.OWN:
      raise ValueError(
        f"--config sets {name!r}; accepted: {', '.join(_priced.OWN)}"
      )
    if not FLAGS[name].present:
      setattr(FLAGS, name, _config.parsed(FLAGS[name], value))


def print_round(pair: TargetDraftPair, prefix_acceptance) -> None:
  """Where the time of a round goes."""
  best = planning.best_k(pair, 1, FLAGS.context, prefix_acceptance, FLAGS.most)
  header = ["part", "times", "term", "MB", "GFLOP", "MB sent", "ms"]
  for k in sorted({0, best.k or FLAGS.most}):
    found = pair.round(1, k, FLAGS.context)
    terminal.report(f"\na round of k = {k}, batch 1, context {FLAGS.context}")
    terminal.report(columns(header, prediction.explain(found)))
    distribution = planning.curve(prefix_acceptance, FLAGS.most)[:k]
    one = theory.latency(distribution, found.seconds)
    terminal.report(
      f"  {theory.expected_tokens(distribution):.2f} tokens in "
      f"{1e3 * found.seconds:.3f} ms; a token of a text of 128 takes "
      f"{1e3 * one.mean:.3f} ms in the mean, {1e3 * one.p99:.3f} ms in one "
      "text of a hundred"
    )


def print_plans(
  pair: TargetDraftPair, prefix_acceptance, batches, contexts
) -> None:
  """Best k by batch and context, break-even, equal memory, schedules."""
  lines = []
  for batch in batches:
    cells = [str(batch)]
    for context in contexts:
      if np.isnan(gain(pair, batch, context, ())):
        cells.append("-")
        continue
      best = planning.best_k(
        pair, batch, context, prefix_acceptance, FLAGS.most
      )
      cells.append(f"{best.k}: {best.speedup:.2f}")
    lines.append(cells)
  terminal.report("\nbest k and its speedup; -: does not fit")
  header = ["batch \\ context", *map(str, contexts)]
  terminal.report(columns(header, lines))
  even = planning.break_even_batch(
    pair, FLAGS.context, prefix_acceptance, FLAGS.most
  )
  if even is None:
    terminal.report(
      f"\nat context {FLAGS.context} some k pays at batch 4096 still"
    )
  else:
    terminal.report(
      f"\nat context {FLAGS.context} no k pays from batch {even} on"
    )
  if even:
    back = planning.break_even_context(
      pair, even, prefix_acceptance, FLAGS.most
    )
    if back:
      terminal.report(f"at batch {even} it pays from context {back} on")
  most = 256
  if np.isfinite(pair.target.chip.memory):  # of some machines nobody says
    ours, baseline = planning.at_equal_memory(
      pair, FLAGS.context, prefix_acceptance, FLAGS.most
    )
    for name, one in (("with the drafter", ours), ("without it", baseline)):
      terminal.report(
        f"as many rows as fit {name}: {one.batch}, with k = {one.k} "
        f"{one.tokens_per_second:,.0f} tokens/s, "
        f"{1e3 * one.seconds_per_token:.1f} ms a token"
      )
    most = min(most, ours.batch)
  batch_ranges = planning.schedule(
    pair, FLAGS.context, prefix_acceptance, FLAGS.most, most
  )
  terminal.report(f"vLLM: {json.dumps(planning.as_vllm(batch_ranges))}")
  try:
    said = json.dumps(planning.as_tensorrt_llm(batch_ranges))
  except ValueError as error:
    said = str(error)
  terminal.report(f"TensorRT-LLM: {said}")


def print_drafts(pair: TargetDraftPair) -> None:
  """What drafts of --drafts' sizes gain with their own best k."""
  drafts = [_priced.shape_of(name) for name in FLAGS.drafts]
  found = planning.best_draft(
    pair.target, drafts, _priced.distribution_of(), 1, FLAGS.context, FLAGS.most
  )
  best = max(found, key=lambda sized: sized.best.speedup)
  terminal.report(
    "best draft size by --law, batch 1: "
    f"{best.shape.num_parameters / 1e9:.3g} "
    f"B parameters, {best.alpha:.2f} of its draft tokens kept, k = "
    f"{best.best.k}, "
    f"{best.best.speedup:.2f} times autoregressive decoding"
  )


def print_tree(pair: TargetDraftPair) -> None:
  """The tree that pays most for --rank_acceptance."""
  rates = _priced.numbers_of(FLAGS.rank_acceptance, "rank_acceptance")
  found = planning.best_tree(pair, 1, FLAGS.context, rates)
  baseline = pair.baseline(1, FLAGS.context).seconds
  levels = len(found.paths[-1]) if found.paths else 0
  terminal.report(
    f"best tree at batch 1: {len(found.paths)} draft tokens in {levels} "
    "levels, "
    f"{found.tokens:.2f} tokens in {1e3 * found.seconds:.2f} ms, "
    f"{found.tokens * baseline / found.seconds:.2f} times autoregressive "
    "decoding"
  )


def roofline() -> None:
  """The whole run."""
  apply_config()
  if FLAGS.papers:
    terminal.report(papers.tables())
    return
  if FLAGS.source < 0:
    raise ValueError(f"--source={FLAGS.source}; it must be >= 0")
  for name in ("ways", "replicas", "draft_ways", "most", "context"):
    if getattr(FLAGS, name) is not None and getattr(FLAGS, name) < 1:
      raise ValueError(f"--{name}={getattr(FLAGS, name)}; it must be >= 1")
  batches = _priced.integers_of(FLAGS.batches, "batches")
  contexts = _priced.integers_of(FLAGS.contexts, "contexts")
  prefix_acceptance = FLAGS.alpha
  if FLAGS.prefix_acceptance:
    prefix_acceptance = _priced.numbers_of(
      FLAGS.prefix_acceptance, "prefix_acceptance"
    )
  planning.curve(prefix_acceptance, FLAGS.most)  # is it one?
  if FLAGS.output:
    _main.take_folder("--output", FLAGS.output)
  known = None
  if FLAGS.calibration:
    text = Path(FLAGS.calibration).read_text(encoding="utf-8")
    known = Calibration.from_json(text)
    FLAGS.weights = FLAGS.kv = "float32"
    FLAGS.ways = FLAGS.replicas = FLAGS.draft_ways = 1
  chip = (
    chips.of_hardware(known.hardware) if known else _priced.chip_of(FLAGS.chip)
  )
  pair = _priced.pair_on(chip, known)
  pair.check_memory(1, FLAGS.context)
  gib = 2**30
  parts = pair.memory(1, FLAGS.context).items()
  terminal.report(
    f"{FLAGS.ways * FLAGS.replicas} x {chip.name} ({chip.source}); of each "
    f"chip's {chip.memory / gib:.1f} GiB: "
    + ", ".join(f"{name} {size / gib:.2f}" for name, size in parts)
  )
  print_round(pair, prefix_acceptance)
  print_plans(pair, prefix_acceptance, batches, contexts)
  if not known:
    print_drafts(pair)
  if FLAGS.rank_acceptance:
    print_tree(pair)
  if FLAGS.output:
    folder = Path(FLAGS.output)
    shown = pair, prefix_acceptance, batches, contexts
    _roofline_pictures.write_cells(folder / "cells.csv", *shown)
    _roofline_pictures.draw(folder, known, *shown)
    terminal.report(f"pictures and cells.csv: {folder}", file=sys.stderr)


main = _main.main_of("roofline", roofline)

if __name__ == "__main__":
  _main.start(main)
