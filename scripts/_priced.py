"""A target and a draft on chips, as roofline.py's flags name them."""

import dataclasses
import sys

import _config
import _output
from absl import flags

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.roofline import chips, hardware, shapes, theory
from specdec.roofline.cost import BYTES, IDEAL, TYPICAL, Deployment
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import terminal
from specdec.utils.spelling import choices

_EFFICIENCY = {"ideal": IDEAL, "typical": TYPICAL}
# Of LaMDA 137B's drafts (arXiv:2211.17192, table 3).
_DISTRIBUTION = ["1e8:0.61", "2e9:0.71", "8e9:0.75"]

_config.define("config", "File whose get_config() sets flags not given here.")
_BEFORE = set(flags.FLAGS)
flags.DEFINE_string(
  "chip", "v5p", f"One of {', '.join(chips.CHIPS)}, or local: this machine."
)
flags.DEFINE_list(
  "numbers",
  [],
  "Instead of the datasheet's: bandwidth=1e12, memory=9e10, bfloat16=2e14 (its "
  "rate), link_bandwidth, axes, hop_seconds ...",
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
  "draft", "llama3-1b", "The same; none: draft tokens that cost nothing."
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
  _DISTRIBUTION,
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
  "draft_ways",
  None,
  "Chips that share the draft's; 1: each has all of it. Default: --ways.",
)
flags.DEFINE_float(
  "correlation", 0.75, "Of the experts that tokens choose; 1: independent."
)
flags.DEFINE_float(
  "alpha", 0.75, "Share of draft tokens kept, at every position."
)
flags.DEFINE_list(
  "prefix_acceptance",
  [],
  "Instead: share of rounds that keep draft tokens 1, 1 to 2, ...",
)
flags.DEFINE_list(
  "rank_acceptance",
  [],
  "How often a node's first, second ... child is kept: prints the best tree.",
)
flags.DEFINE_integer("context", 2048, "Cached positions of a row.")
flags.DEFINE_list("contexts", ["512", "2048", "8192", "32768", "131072"], "")
flags.DEFINE_list("batches", [str(2**i) for i in range(9)], "")
flags.DEFINE_integer("most", 8, "Largest k.", upper_bound=64)
flags.DEFINE_integer("source", 0, "Positions that cross-attention reads (T5).")
flags.adopt_module_key_flags(_output)
flags.DEFINE_bool("papers", False, "Only print the papers' tables, recomputed.")
FLAGS = flags.FLAGS
OWN = sorted({*FLAGS} - _BEFORE | {"output"})


def numbers_of(texts, what: str) -> list[float]:
  """Refuses what is no number."""
  try:
    return [float(text) for text in texts]
  except ValueError as error:
    raise ValueError(f"--{what}: {error}") from None


def integers_of(texts, what: str) -> list[int]:
  """Refuses what is no whole number from 1 on."""
  found = numbers_of(texts, what)
  for number in found:
    if not (1 <= number < 2**31 and number == int(number)):  # nor is NaN
      raise ValueError(
        f"--{what}: {number:g}; it must be whole and in 1..2**31 - 1"
      )
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
    if name == FLAGS.target:
      raise ValueError(
        f"--target={name} is a share of itself; give a checkpoint or one of "
        f"{', '.join(shapes.names())}"
      )
    return shapes.scaled(shape_of(FLAGS.target), share)
  try:
    source = fetch(name)
    return shapes.of_config(checkpoints.inspect(source, "float32"), name)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"no model {name!r} ({error}); shapes: {choices(name, shapes.names())}"
    ) from None


def chip_of(name: str) -> chips.Chip:
  changes = {}
  for text in FLAGS.numbers if name == FLAGS.chip else ():
    key, _, value = text.partition("=")
    [changes[key]] = numbers_of([value], "numbers")
  if name != "local":
    return chips.get(name, **changes)
  found = hardware.local(
    progress=lambda what: terminal.report(what, file=sys.stderr)
  )
  return chips.changed(chips.of_hardware(found), **changes)


def place(name: str, chip, ways: int, known) -> Deployment:
  """A model on chips; calibrated where `known` is a calibration."""
  made = Deployment(
    shape_of(name),
    chip,
    FLAGS.weights,
    FLAGS.kv,
    FLAGS.compute,
    ways,
    FLAGS.replicas,
    _EFFICIENCY[FLAGS.efficiency],
    source=FLAGS.source,
    correlation=FLAGS.correlation,
  )
  return known.place(name, made) if known else made


def pair_on(chip, known=None, draft: str | None = None) -> TargetDraftPair:
  """Target and draft on a chip."""
  target = place(FLAGS.target, chip, FLAGS.ways, known)
  draft = draft or FLAGS.draft
  if FLAGS.exit_layer is not None:
    first = dataclasses.replace(target, stop=FLAGS.exit_layer)
    if known:
      first = known.place(
        f"{FLAGS.target}, first {FLAGS.exit_layer} layers", first
      )
    made, who = (
      TargetDraftPair(target, first, FLAGS.exit_layer),
      f"exit after {FLAGS.exit_layer}",
    )
  elif draft == "none":
    made, who = TargetDraftPair(target), "lookup"
  else:
    ways = FLAGS.draft_ways or FLAGS.ways
    made, who = TargetDraftPair(target, place(draft, chip, ways, known)), draft
  settings = [
    name
    for name in (known.overhead if known else ())
    if name.startswith(f"{FLAGS.target}, {who}, ")
  ]
  if not settings:
    return made
  terminal.report(f"beside the passes: as of {settings[0]}", file=sys.stderr)
  found = known.overhead[settings[0]]
  return dataclasses.replace(
    made, overhead=found.ours, baseline_overhead=found.baseline
  )


def gain(
  pair: TargetDraftPair, batch: int, context: int, prefix_acceptance
) -> float:
  """nan where it does not fit."""
  try:
    pair.check_memory(batch, context)
  except ValueError:
    return float("nan")
  return pair.speedup(batch, context, prefix_acceptance)


def distribution_of() -> theory.PowerLaw:
  """--law."""
  pairs = [text.partition(":") for text in FLAGS.law]
  sizes = numbers_of([size for size, _, _ in pairs], "law")
  return theory.fit_power_law(
    sizes, numbers_of([rate for _, _, rate in pairs], "law")
  )
