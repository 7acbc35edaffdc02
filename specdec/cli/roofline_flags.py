"""The flags of the program roofline, as a Scenario and a Workload."""

import functools
import pathlib
import sys
from collections.abc import Sequence

from specdec.benchmark.scenario import Scenario
from specdec.cli import app
from specdec.cli.app import Flags, Options
from specdec.cli.setup_flags import refuse
from specdec.report.roofline import Workload
from specdec.roofline import chips, shapes, theory
from specdec.roofline.calibration import Calibration
from specdec.roofline.chips import Chip
from specdec.roofline.cost import BYTES, IDEAL, TYPICAL
from specdec.utils.terminal import report

_EFFICIENCY = {"ideal": IDEAL, "typical": TYPICAL}
_DEPLOYMENT = (
  "chip", "numbers", "efficiency", "weights", "kv", "compute", "ways",
  "replicas", "draft_ways",
)  # fmt: skip


def define(flags: Flags) -> None:
  types, names = list(BYTES), ", ".join(shapes.names())
  accepted = f"One of {', '.join(chips.CHIPS)}, or local: measured."
  flags.string("chip", "v5p", accepted)
  flags.string(
    "calibration", None, "File of bench.py --calibrate, for a datasheet."
  )
  flags.string("target", "llama3-70b", f"A checkpoint, or a shape: {names}.")
  flags.string(
    "drafter",
    "model(llama3-1b)",
    "A call: model(NAME), with a checkpoint, a shape or a share of the "
    "target as model(0.03); lookup: its drafts cost nothing. Of a target "
    "that is a checkpoint or a preset any drafter of generate.py, two with | "
    "between them, or your own, file.py:name(...), whose Drafter has a cost.",
  )
  flags.string("output", None, "Folder for pictures and cells.csv.")
  flags.string("json", None, "File for what is printed.")
  flags.config("config", "File whose get_config() sets flags not given here.")
  flags.list(
    "numbers",
    [],
    "Instead of the datasheet's: bandwidth=1e12, memory=9e10, bfloat16=2e14 "
    "(its rate), link_bandwidth, axes, hop_seconds ...",
  )
  flags.list(
    "chips", [], "Also predict for these chips, or for all: a table, a picture."
  )
  flags.enum(
    "efficiency",
    "typical",
    list(_EFFICIENCY),
    "ideal: all of the peaks, the larger of moving and computing. typical: "
    "what vLLM reached with an 8B model on an H100, and the sum of the two.",
  )
  flags.list(
    "drafts",
    ["0.003", "0.01", "0.03", "0.1", "0.3"],
    "With a draft model: others to compare, shapes or shares of the target.",
  )
  flags.list(
    "draft_acceptance",
    ["1e8:0.61", "2e9:0.71", "8e9:0.75"],  # arXiv:2211.17192, table 3
    "Of --drafts, PARAMETERS:RATE each; a power law is fitted to them. "
    "Default: drafts of LaMDA 137B.",
  )
  flags.enum("weights", "bfloat16", types, "Type of both models' weights.")
  flags.enum("kv", "bfloat16", types, "Type of both KV caches, without scales.")
  flags.enum(
    "compute",
    None,
    types,
    "Type of matrix products; default that of the weights.",
  )
  flags.integer("ways", 4, "Chips that share the target's weights.")
  flags.integer("replicas", 1, "Groups of such chips, sharing the batch.")
  flags.integer(
    "draft_ways",
    None,
    "Chips that share the draft's weights; 1: each has all of them. Default: "
    "--ways, but 1 of a trained head in integers, or that they do not divide.",
  )
  flags.float(
    "correlation",
    0.75,
    "Of the experts that tokens choose, r in docs/roofline.md; 1: independent.",
  )
  flags.float("alpha", 0.75, "Share of draft tokens accepted, everywhere.")
  flags.list(
    "prefix_acceptance",
    [],
    "Instead of --alpha: share of rounds accepting draft tokens 1, 1 to 2, ...",
  )
  flags.list(
    "rank_acceptance",
    [],
    "How often a node's first, second ... child is accepted: prints the best "
    "tree.",
  )
  flags.integer("context", 2048, "Cached positions of a row.")
  contexts, batches = "512,2048,8192,32768,131072", "1,2,4,8,16,32,64,128,256"
  flags.integers("contexts", contexts, "Contexts in tables and pictures.")
  flags.integers("batches", batches, "Batch sizes in tables and pictures.")
  flags.integer("most", 8, "Largest k.", upper_bound=64)
  flags.integer("source", 0, "Positions that cross-attention reads (T5).")
  flags.integer(
    "lengths",
    0,
    "Repeats of decoding table models, whose rounds are priced: fixed k, auto, "
    "adaptive and AdaEDL by --batches, rows that accept --alpha and rows that "
    "accept unequally.",
  )
  flags.bool("papers", False, "Only print the papers' tables, recomputed.")


def check(options: Options) -> None:
  """Raises ValueError where a flag has no effect with others."""
  if options.papers:
    others = sorted(options.given - {"papers", "json"})
    refuse(options, others, "has no effect on the papers' tables")
  if options.calibration:
    why = "is the calibrated machine's; leave it out with --calibration"
    refuse(options, _DEPLOYMENT, why)
  if options.prefix_acceptance:
    refuse(options, ["alpha"], "and --prefix_acceptance: give one of them")
    refuse(options, ["lengths"], "has rows that accept --alpha everywhere")
  counts = "ways", "replicas", "draft_ways", "most", "context", "contexts"
  app.check_at_least(options, 1, *counts, "batches")
  app.check_at_least(options, 0, "source", "lengths")


def other_chips(options: Options) -> list[Chip]:
  """Returns those of --chips; all: that have products of --compute."""
  if options.chips != ["all"]:
    return [chip_of(name) for name in options.chips]
  dtype = options.compute or "bfloat16"
  return [chip for chip in chips.CHIPS.values() if dtype in chip.flops]


def chip_of(name: str, /, **changes) -> Chip:
  """Returns a chip; measuring this machine is reported."""
  return chips.get(name, functools.partial(report, file=sys.stderr), **changes)


def scenario(options: Options) -> Scenario:
  """Returns what the prediction is about; refuses flags without effect."""
  names = ["target", "drafter", "correlation", "source", "most"]
  if options.calibration:
    path = pathlib.Path(options.calibration)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
      calibration = Calibration.from_json(text)
    except ValueError as error:
      raise ValueError(f"--calibration={path}: {error}") from error
    given = {"weights": "float32", "kv": "float32", "calibration": calibration}
    given["chip"] = chips.of_hardware(calibration.hardware)
  else:
    names += _DEPLOYMENT[3:]
    pairs = [text.partition("=") for text in options.numbers]
    values = numbers("numbers", [value for _, _, value in pairs])
    changes = dict(zip([key for key, _, _ in pairs], values))
    efficiency = _EFFICIENCY[options.efficiency]
    given = {"chip": chip_of(options.chip, **changes), "efficiency": efficiency}
  given |= {name: getattr(options, name) for name in names}
  built = Scenario.of(**given)
  models = [built.deployment.shape]
  if built.cost.shape is not None:
    models.append(built.cost.shape)
  if not any(layer.num_experts for x in models for layer in x.layers):
    refuse(options, ["correlation"], "is of experts; these models have none")
  if not compares_drafts(built):
    why = "compares draft models on a datasheet's chip; here is none"
    refuse(options, ["drafts", "draft_acceptance"], why)
  cost = built.cost
  if cost.shape is None or cost.shares_target or cost.steps is not None:
    refuse(options, ["lengths"], "prices the steps of a draft model(NAME)")
  return built


def compares_drafts(scenario: Scenario) -> bool:
  """Whether other draft models can stand in the place of the drafter."""
  model = scenario.draft_name is not None and len(scenario.drafter_calls) == 1
  return model and scenario.calibration is None


def workload(options: Options) -> Workload:
  """Returns what is decoded."""
  acceptance = options.alpha
  if options.prefix_acceptance:
    acceptance = numbers("prefix_acceptance", options.prefix_acceptance)
  sizes = options.batches, options.contexts, options.context, options.most
  built = Workload(acceptance, *sizes)
  built.curve  # noqa: B018  (checks it)
  return built


def draft_acceptance(options: Options) -> theory.PowerLaw:
  """Returns acceptance by the size of a draft model."""
  pairs = [text.partition(":") for text in options.draft_acceptance]
  sizes, rates = (
    numbers("draft_acceptance", [pair[i] for pair in pairs]) for i in (0, 2)
  )
  return theory.fit_power_law(sizes, rates)


def numbers(name: str, texts: Sequence[str]) -> list[float]:
  """Returns a flag's entries as numbers."""
  try:
    return [float(text) for text in texts]
  except ValueError as error:
    raise ValueError(f"--{name}: {error}") from None
