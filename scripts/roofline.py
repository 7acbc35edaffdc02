"""Predicts what speculation gains, from datasheets or a calibrated machine.

  python scripts/roofline.py                        # Llama 3 70B + 1B on v5p:4
  python scripts/roofline.py --chip=h100 --target=llama3-8b --draft=llama3-1b \\
    --alpha=0.8 --output=runs/roofline
  python scripts/roofline.py --chip=v6e --ways=8 --target=llama3-70b \\
    --weights=int8 --context=32768 --survival=0.8,0.66,0.55,0.47
  python scripts/roofline.py --calibration=calibration.json \\
    --target=stdlib-11m --draft=stdlib-1m --alpha=0.85
  python scripts/roofline.py --papers         # the founding papers' tables

Prints what a round costs term by term, the best k for every batch and context,
where speculation stops paying, the gain at equal memory, and schedules for
engines. With --output it writes pictures (speedup over k and batch, k and
context, k and draft size, k and acceptance; chips side by side; the roofline)
and cells.csv.
"""

import csv
import dataclasses
import json
import sys
from pathlib import Path

import _main
import _output
import _papers
import numpy as np
from absl import flags
from ml_collections import config_flags

from specdec import checkpoints
from specdec.analysis import (
  calibration,
  chips,
  hardware,
  heatmaps,
  planning,
  prediction,
  shapes,
  speedup,
)
from specdec.analysis.cost import BYTES, IDEAL, TYPICAL, Placed
from specdec.analysis.pairs import Pair
from specdec.checkpoints.fetch import fetch
from specdec.display import columns

_CELL = (
  "chip", "target", "draft", "batch", "context", "k", "fits",
  "tokens_per_round", "round_ms", "plain_ms", "speedup", "tokens_per_second",
  "ms_per_token", "p99_ms_per_token",
)  # fmt: skip
_EFFICIENCY = {"ideal": IDEAL, "typical": TYPICAL}
# Of LaMDA 137B's drafts (arXiv:2211.17192, table 3).
_LAW = ["1e8:0.61", "2e9:0.71", "8e9:0.75"]

config_flags.DEFINE_config_file(
  "config", None, "File whose get_config() sets flags not given here."
)
_BEFORE = set(flags.FLAGS)
flags.DEFINE_string(
  "chip", "v5p", f"One of {', '.join(chips.CHIPS)}, or local: this machine."
)
flags.DEFINE_list(
  "numbers",
  [],
  "Instead of the datasheet's: bandwidth=1e12, memory=9e10, link_bandwidth, "
  "axes, hop_seconds ...",
)
flags.DEFINE_list("chips", [], "More chips, to set beside it.")
flags.DEFINE_string(
  "calibration", None, "File of bench.py --calibrate, instead of a datasheet."
)
flags.DEFINE_enum(
  "efficiency",
  "typical",
  _EFFICIENCY,
  "ideal: all of the peaks, the larger of moving and computing. typical: what "
  "vLLM reached with an 8B model on an H100, and the sum of the two.",
)
flags.DEFINE_string(
  "target",
  "llama3-70b",
  f"A checkpoint, or a shape: {', '.join(shapes.names())}.",
)
flags.DEFINE_string(
  "draft", "llama3-1b", "The same; none: guesses that cost nothing."
)
flags.DEFINE_integer(
  "exit_layer", None, "The target's own first layers draft instead."
)
flags.DEFINE_list(
  "drafts",
  ["0.003", "0.01", "0.03", "0.1", "0.3"],
  "Draft sizes to compare: shapes, or shares of the target.",
)
flags.DEFINE_list(
  "law",
  _LAW,
  "Acceptance by draft size, PARAMETERS:RATE each; a power law goes through "
  "them. Default: drafts of LaMDA 137B.",
)
flags.DEFINE_enum("weights", "bfloat16", list(BYTES), "Of both models.")
flags.DEFINE_enum("kv", "bfloat16", list(BYTES), "Of both caches.")
flags.DEFINE_enum(
  "compute", None, list(BYTES), "Of products; default as the weights."
)
flags.DEFINE_integer("ways", 4, "Chips that share the target's weights.")
flags.DEFINE_integer("replicas", 1, "Groups of such chips, sharing the batch.")
flags.DEFINE_integer(
  "draft_ways", 1, "Chips that share the draft's; 1: each has all of it."
)
flags.DEFINE_float(
  "correlation", 0.75, "Of the experts that tokens choose; 1: independent."
)
flags.DEFINE_float("alpha", 0.75, "Share of guesses kept, at every position.")
flags.DEFINE_list(
  "survival", [], "Instead: share of rounds that keep guesses 1, 1 to 2, ..."
)
flags.DEFINE_list(
  "rank_acceptance",
  [],
  "How often a node's first, second ... child is kept: prints the best tree.",
)
flags.DEFINE_integer("context", 2048, "Cached positions of a row.")
flags.DEFINE_list("contexts", ["512", "2048", "8192", "32768", "131072"], "")
flags.DEFINE_list("batches", [str(2**i) for i in range(9)], "")
flags.DEFINE_integer("most", 8, "Largest k.")
flags.DEFINE_integer("source", 0, "Positions that cross-attention reads (T5).")
flags.adopt_module_key_flags(_output)
flags.DEFINE_bool("papers", False, "Only print the papers' tables, recomputed.")
FLAGS = flags.FLAGS
_OWN = sorted({*FLAGS} - _BEFORE | {"output"})


def apply_config() -> None:
  """Sets flags from --config, except those given on the command line."""
  for name, value in (FLAGS.config or {}).items():
    if name not in _OWN:
      raise ValueError(f"--config sets {name!r}; accepted: {', '.join(_OWN)}")
    if not FLAGS[name].present:
      setattr(FLAGS, name, value)


def numbers_of(texts, what: str) -> list[float]:
  """Refuses what is no number."""
  try:
    return [float(text) for text in texts]
  except ValueError as error:
    raise ValueError(f"--{what}: {error}") from None


def integers_of(texts, what: str) -> list[int]:
  found = numbers_of(texts, what)
  if any(x != int(x) or x < 0 for x in found):
    raise ValueError(f"--{what}: {found} are not whole numbers")
  return [int(x) for x in found]


def shape_of(name: str) -> shapes.Shape:
  """A preset, a share of the target, or a checkpoint's config."""
  if name in shapes.names():
    return shapes.get(name)
  try:
    share = float(name)
  except ValueError:
    pass
  else:
    return shapes.scaled(shape_of(FLAGS.target), share)
  try:
    source = fetch(name)
    return shapes.of_config(checkpoints.inspect(source, "float32"), name)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"no model {name!r} ({error}); shapes: {', '.join(shapes.names())}"
    ) from None


def chip_of(name: str) -> chips.Chip:
  changes = {}
  for text in FLAGS.numbers if name == FLAGS.chip else ():
    key, _, value = text.partition("=")
    [changes[key]] = numbers_of([value], "numbers")
  if name != "local":
    return chips.get(name, **changes)
  found = chips.of_hardware(
    hardware.local(progress=lambda what: print(what, file=sys.stderr))
  )
  return dataclasses.replace(found, **changes)


def place(name: str, chip, ways: int, known, **layers) -> Placed:
  """A model on chips; calibrated where `known` is a calibration."""
  made = Placed(
    shape_of(name),
    chip,
    FLAGS.weights,
    FLAGS.kv,
    FLAGS.compute,
    ways,
    FLAGS.replicas,
    _EFFICIENCY[FLAGS.efficiency],
    correlation=FLAGS.correlation,
    **layers,
  )
  return known.place(name, made) if known else made


def pair_on(chip, known=None, draft: str | None = None) -> Pair:
  """Target and draft on a chip."""
  target = place(FLAGS.target, chip, FLAGS.ways, known)
  if FLAGS.exit_layer is not None:
    first = dataclasses.replace(target, stop=FLAGS.exit_layer)
    return Pair(target, first, FLAGS.exit_layer)
  draft = draft or FLAGS.draft
  if draft == "none":
    return Pair(target)
  made = Pair(target, place(draft, chip, FLAGS.draft_ways, known))
  if known:
    for setting, found in known.beside.items():
      if setting.startswith(f"{FLAGS.target}, {draft}, "):
        print(f"beside the passes: as of {setting}", file=sys.stderr)
        return dataclasses.replace(
          made, beside=found.ours, plain_beside=found.plain
        )
  return made


def grid(rows, columns_, value) -> np.ndarray:
  return np.array([[value(row, column) for column in columns_] for row in rows])


def gain(pair: Pair, batch: int, context: int, survival) -> float:
  """nan where it does not fit."""
  try:
    pair.check_memory(batch, context)
  except ValueError:
    return float("nan")
  return pair.speedup(batch, context, survival)


def print_round(pair: Pair, survival) -> None:
  """Where the time of a round goes."""
  best = planning.best_k(pair, 1, FLAGS.context, survival, FLAGS.most)
  header = ["part", "times", "term", "MB", "GFLOP", "MB sent", "ms"]
  for k in sorted({0, best.k or FLAGS.most}):
    found = pair.round(1, k, FLAGS.context, FLAGS.source)
    print(f"\na round of k = {k}, batch 1, context {FLAGS.context}")
    print(columns(header, prediction.explain(found)))
    law = planning.curve(survival, FLAGS.most)[:k]
    one = speedup.latency(law, found.seconds)
    print(
      f"  {speedup.expected_tokens(law):.2f} tokens in "
      f"{1e3 * found.seconds:.3f} ms; a token of a text of 128 takes "
      f"{1e3 * one.mean:.3f} ms in the mean, {1e3 * one.p99:.3f} ms in one "
      "text of a hundred"
    )


def print_plans(pair: Pair, survival, batches, contexts) -> None:
  """Best k by batch and context, break-even, equal memory, schedules."""
  lines = []
  for batch in batches:
    cells = [str(batch)]
    for context in contexts:
      if np.isnan(gain(pair, batch, context, ())):
        cells.append("-")
        continue
      best = planning.best_k(pair, batch, context, survival, FLAGS.most)
      cells.append(f"{best.k}: {best.speedup:.2f}")
    lines.append(cells)
  print("\nbest k and its speedup; -: does not fit")
  header = ["batch \\ context", *map(str, contexts)]
  print(columns(header, lines))
  even = planning.break_even_batch(pair, FLAGS.context, survival, FLAGS.most)
  print(
    f"\nat context {FLAGS.context} speculation stops paying at batch "
    f"{even or 'above any tried'}"
  )
  if even:
    back = planning.break_even_context(pair, even, survival, FLAGS.most)
    if back:
      print(f"at batch {even} it pays from context {back} on")
  ours, plain = planning.at_equal_memory(
    pair, FLAGS.context, survival, FLAGS.most
  )
  for name, one in (("with the drafter", ours), ("without it", plain)):
    print(
      f"as many rows as fit {name}: {one.batch}, with k = {one.k} "
      f"{one.tokens_per_second:,.0f} tokens/s, "
      f"{1e3 * one.seconds_per_token:.1f} ms a token"
    )
  stretches = planning.schedule(pair, FLAGS.context, survival, FLAGS.most)
  print(f"vLLM: {json.dumps(planning.as_vllm(stretches))}")
  print(f"TensorRT-LLM: {json.dumps(planning.as_tensorrt_llm(stretches))}")


def print_tree(pair: Pair) -> None:
  """The tree that pays most for --rank_acceptance."""
  rates = numbers_of(FLAGS.rank_acceptance, "rank_acceptance")
  found = planning.best_tree(pair, 1, FLAGS.context, rates)
  plain = pair.plain(1, FLAGS.context).seconds
  levels = len(found.paths[-1]) if found.paths else 0
  print(
    f"best tree at batch 1: {len(found.paths)} guesses in {levels} levels, "
    f"{found.tokens:.2f} tokens in {1e3 * found.seconds:.2f} ms, "
    f"{found.tokens * plain / found.seconds:.2f} times plain decoding"
  )


def write_cells(path: Path, pair: Pair, survival, batches, contexts) -> None:
  """Every batch, context and k."""
  curve = planning.curve(survival, FLAGS.most)
  with path.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(_CELL)
    for batch in batches:
      for context in contexts:
        plain = pair.plain(batch, context).seconds
        fits = not np.isnan(gain(pair, batch, context, ()))
        for k in range(len(curve) + 1):
          tokens = speedup.expected_tokens(curve[:k])
          seconds = pair.round(batch, k, context).seconds
          one = speedup.latency(curve[:k], seconds)
          writer.writerow(
            [
              pair.target.chip.name,
              FLAGS.target,
              FLAGS.draft if FLAGS.exit_layer is None else FLAGS.exit_layer,
              batch,
              context,
              k,
              fits,
              *(
                f"{x:.6g}"
                for x in (
                  tokens,
                  1e3 * seconds,
                  1e3 * plain,
                  tokens * plain / seconds,
                  batch * tokens / seconds,
                  1e3 * one.mean,
                  1e3 * one.p99,
                )
              ),
            ]
          )


def draw(folder: Path, pair: Pair, known, survival, batches, contexts) -> None:
  """The pictures."""
  ks = list(range(FLAGS.most + 1))
  curve = planning.curve(survival, FLAGS.most)
  ks = ks[: len(curve) + 1]
  who = f"{FLAGS.target} + {FLAGS.draft}"
  if FLAGS.exit_layer is not None:
    who = f"{FLAGS.target}, exit after layer {FLAGS.exit_layer}"
  where = f"{FLAGS.ways * FLAGS.replicas} x {pair.target.chip.name}"
  rate = "given survival" if FLAGS.survival else f"alpha {FLAGS.alpha:g}"
  title = f"{who} on {where}, {FLAGS.weights}"

  def over(name, values, columns_, label, shown):
    if np.any(np.isnan(values)):
      shown += "; -: does not fit"
    heatmaps.speedups(
      {shown: values},
      columns_,
      ks,
      (label, "k"),
      folder / f"{name}.png",
      title,
    )

  by_batch = grid(
    ks, batches, lambda k, b: gain(pair, b, FLAGS.context, curve[:k])
  )
  over("k_batch", by_batch, batches, "batch, rows", f"context {FLAGS.context}")
  by_context = grid(ks, contexts, lambda k, s: gain(pair, 1, s, curve[:k]))
  over(
    "k_context", by_context, contexts, "context, positions", f"batch 1, {rate}"
  )
  rates = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
  by_rate = grid(
    ks,
    rates,
    lambda k, a: gain(pair, 1, FLAGS.context, speedup.iid_survival(a, k)),
  )
  over(
    "k_acceptance",
    by_rate,
    rates,
    "share of guesses kept",
    f"batch 1, context {FLAGS.context}",
  )
  if FLAGS.exit_layer is None and FLAGS.draft != "none" and not known:
    law = law_of()
    made = {
      name: pair_on(pair.target.chip, draft=name) for name in FLAGS.drafts
    }
    sizes = {name: one.draft.shape.num_parameters for name, one in made.items()}
    by_size = grid(
      ks,
      FLAGS.drafts,
      lambda k, name: gain(
        made[name],
        1,
        FLAGS.context,
        speedup.iid_survival(law.alpha(sizes[name]), k),
      ),
    )
    labels = [
      f"{sizes[n] / 1e9:.3g} B\n{law.alpha(sizes[n]):.2f}" for n in sizes
    ]
    over(
      "k_draft",
      by_size,
      labels,
      "draft's parameters, and the share kept by the law of draft size",
      f"batch 1, context {FLAGS.context}",
    )
  curves = {}
  for name in dict.fromkeys([FLAGS.chip, *FLAGS.chips]):
    one = pair if name == FLAGS.chip else pair_on(chip_of(name))
    points = []
    for batch in batches:
      best = planning.best_k(one, batch, FLAGS.context, survival, FLAGS.most)
      fits = not np.isnan(gain(one, batch, FLAGS.context, ()))
      points.append((best.speedup, best.k) if fits else (np.nan, np.nan))
    nowhere = np.all(np.isnan(points))
    label = one.target.chip.name + (": does not fit" if nowhere else "")
    curves[label] = points
  heatmaps.over_batch(
    curves,
    batches,
    folder / "chips.png",
    f"{title}, context {FLAGS.context}, {rate}",
  )
  draw_roof(folder / "roofline.png", pair, batches, title)


def draw_roof(path: Path, pair: Pair, batches, title: str) -> None:
  """Passes of one chip beneath its roof."""
  k = FLAGS.most
  some = batches[0], batches[len(batches) // 2], batches[-1]
  shown = f"batch {some[0]}, {some[1]}, {some[2]}"
  kinds = {
    f"plain decoding,\n{shown}": (pair.target, 1),
    f"verification, k = {k},\n{shown}": (pair.target, k + 1),
  }
  if pair.draft is not None:
    kinds[f"draft,\n{shown}"] = (pair.draft, 1)
  points = {}
  for name, (placed, tokens) in kinds.items():
    points[name] = []
    for batch in some:
      cost = placed.cost(batch, tokens, FLAGS.context, FLAGS.source)
      rate = cost.flops / cost.seconds
      points[name].append((cost.flops / cost.bytes, rate, str(batch)))
  chip = pair.target.chip
  roofs = {chip.name: (chip.bandwidth, chip.rate(pair.target.dtype))}
  for name in FLAGS.chips:
    other = chip_of(name)
    roofs[name] = (other.bandwidth, other.rate(pair.target.dtype))
  heatmaps.roofline(
    roofs, points, path, f"{title}, context {FLAGS.context}, one chip"
  )


def law_of() -> speedup.PowerLaw:
  """--law."""
  pairs = [text.partition(":") for text in FLAGS.law]
  sizes = numbers_of([size for size, _, _ in pairs], "law")
  return speedup.fit_power_law(
    sizes, numbers_of([rate for _, _, rate in pairs], "law")
  )


def roofline() -> None:
  """The whole run."""
  apply_config()
  if FLAGS.papers:
    print(_papers.tables())
    return
  for name in ("ways", "replicas", "draft_ways", "most"):
    if getattr(FLAGS, name) < 1:
      raise ValueError(f"--{name}={getattr(FLAGS, name)}; it must be >= 1")
  batches = integers_of(FLAGS.batches, "batches")
  contexts = integers_of(FLAGS.contexts, "contexts")
  survival = FLAGS.alpha
  if FLAGS.survival:
    survival = numbers_of(FLAGS.survival, "survival")
  planning.curve(survival, FLAGS.most)  # is it one?
  known = None
  if FLAGS.calibration:
    text = Path(FLAGS.calibration).read_text(encoding="utf-8")
    known = calibration.Calibration.from_json(text)
    FLAGS.weights = FLAGS.kv = "float32"
    FLAGS.ways = FLAGS.replicas = FLAGS.draft_ways = 1
  chip = chips.of_hardware(known.hardware) if known else chip_of(FLAGS.chip)
  pair = pair_on(chip, known)
  pair.check_memory(1, FLAGS.context)
  gib = 2**30
  parts = pair.memory(1, FLAGS.context).items()
  print(
    f"{FLAGS.ways * FLAGS.replicas} x {chip.name} ({chip.source}); of each "
    f"chip's {chip.memory / gib:.1f} GiB: "
    + ", ".join(f"{name} {size / gib:.2f}" for name, size in parts)
  )
  print_round(pair, survival)
  print_plans(pair, survival, batches, contexts)
  if FLAGS.rank_acceptance:
    print_tree(pair)
  if FLAGS.output:
    folder = Path(FLAGS.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_cells(folder / "cells.csv", pair, survival, batches, contexts)
    draw(folder, pair, known, survival, batches, contexts)
    print(f"pictures and cells.csv: {folder}", file=sys.stderr)


main = _main.main_of("roofline", roofline)

if __name__ == "__main__":
  _main.start(main)
