"""Hands a Setup over to inference engines: one folder with all they need.

  target/       the model as Hugging Face has it, unless the engine has it
  drafter/      the draft model, or the head in the layout that the engine
                reads; drafter-ENGINE/ where several are given a head
  ENGINE.json   the engine's own options (tensorrt-llm.yaml: JSON is YAML)
  handover.json all of it, with command lines, warnings and refusals, and whose
                keys they are

Nothing is written before every engine has been asked what it refuses.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import specdec
from specdec import checkpoints
from specdec.benchmark import catalog
from specdec.benchmark.engine_keys import Handed, Place, Served
from specdec.benchmark.schedules import Prices
from specdec.benchmark.serving import ENGINES, serve
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import PRESET
from specdec.checkpoints import conversion, formats
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.checkpoints.formats import blocks
from specdec.models.config import TransformerConfig
from specdec.roofline import planning
from specdec.utils import calls, files
from specdec.utils.spelling import naming

NAME = "handover.json"


def describe(setup: Setup) -> Handed:
  """Returns a Setup as engines see it; reads configs, no weights, and refuses
  what no engine here serves."""
  target = target_of(setup)
  if target.encoder_layers:
    raise ValueError(
      f"{setup.target} is an encoder-decoder; the engines here serve decoders"
    )
  if len(setup.drafter_calls) > 1:
    raise ValueError(
      f"{setup.drafter}: no engine here has two drafters, one for the other; "
      "export one of them"
    )
  [call] = setup.drafter_calls
  kind, arguments, head = call.name, {}, None
  if call.place is None and kind in catalog.DRAFTERS:
    arguments = catalog.arguments_of(call)
  if call.place is None and kind in catalog.HEADS:
    head = saved.inspect(saved.resolve(arguments["file"]), target)
    head.check(target)
    kind = blocks.kind_of(head.block) if head.block else head.kind
  known = {name: None for x in ENGINES.values() for name in x.methods}
  if call.place or kind not in known:
    raise ValueError(
      f"{call} drafts in no engine here; of our drafters these do in some: "
      f"{', '.join(known)}"
    )
  for name in "weights", "kv":
    if arguments.get(name):
      raise ValueError(
        f"{call}: a draft is handed over unquantised; leave {name}"
      )
  if head is not None and not head.is_published:
    raise ValueError(
      f"{call}: a head with layout = {head.layout!r} is read by no engine; "
      "train one with layout = 'published'"
    )
  if setup.levels < 1:
    raise ValueError("k = 0 drafts nothing; an engine is given k >= 1")
  if head is not None:
    with naming(str(call)):
      head.check_levels(setup.levels)
  tree = None
  if setup.shape != "chain":
    shape = calls.parse(setup.shape)
    if shape.name != "dynamic":
      raise ValueError(
        f"shape = {setup.shape}: no engine here drafts such trees; chain goes "
        "to all of them, dynamic(SIZE, top=TOP) to SGLang and TensorRT-LLM"
      )
    bound = calls.bind(shape, catalog.SHAPES["dynamic"], {"k": setup.levels})
    bound.apply_defaults()
    tree = {name: bound.arguments[name] for name in ("size", "top")}
  return Handed(
    kind,
    setup.levels,
    arguments,
    head,
    tree,
    setup.make_rule().name,
    setup.rule_arguments,
    setup.make_rule().lossless,
    setup.temperature,
    target.num_layers,
  )


class Handover(NamedTuple):
  """What is handed over: of each engine what it is given, or its refusal."""

  served: dict[str, Served]
  refused: dict[str, str]
  schedule: list[planning.BatchRange] | None


def _folder(handed: Handed, engine: str, engines: Sequence[str]) -> str | None:
  """Returns the name of the folder with an engine's drafter; None: no file."""
  if handed.kind in ("lookup", "suffix"):
    return None
  return f"drafter-{engine}" if handed.head and len(engines) > 1 else "drafter"


def ask(
  setup: Setup,
  handed: Handed,
  engines: Sequence[str],
  output: Path,
  target_as: str | None = None,
  schedule: list[planning.BatchRange] | None = None,
) -> Handover:
  """Asks engines what they take; writes nothing.

  Args:
    engines: of ENGINES; with several, those that refuse are left out.
    output: the folder that will be written.
    target_as: the name by which engines find the target; None: in the folder.

  Raises:
    ValueError: all of them refuse; with one, its own sentence.
  """
  served, refused, described = {}, {}, None
  if handed.head is not None:
    described = conversion.describe_target(setup.target, target_of(setup))
  for engine in engines:
    drafter = _folder(handed, engine, engines)
    place = Place(
      target_as or str(output / "target"),
      str(output / (drafter or "")),
      str(output / file_of(engine)),
    )
    try:
      given = serve(engine, handed, place, schedule)
      if described is not None:
        layout = ENGINES[engine].layouts[handed.kind]
        formats.render(layout, handed.head, described)
      served[engine] = given
    except ValueError as error:
      refused[engine] = str(error)
  if not served:
    raise ValueError("; ".join(dict.fromkeys(refused.values())))
  return Handover(served, refused, schedule)


def file_of(engine: str) -> str:
  """Returns the name of the file with an engine's own options."""
  return f"{engine}.{'yaml' if engine == 'tensorrt-llm' else 'json'}"


def write(
  output: Path,
  setup: Setup,
  handed: Handed,
  handover: Handover,
  dtype: str,
  target_as: str | None = None,
  prices: Prices | None = None,
) -> None:
  """Writes the folder with what `ask` returned, and weights in `dtype`."""
  source = Path(fetch(setup.target))
  engines = [*handover.served, *handover.refused]

  def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    target = None
    if target_as is None:
      path = folder / "target"
      target = conversion.convert_model(source, "safetensors", path, dtype)
      generation = path / "generation_config.json"
      if not generation.exists():  # engines look for one
        _write_json(generation, {})
    elif handed.head is not None:
      target = checkpoints.load(source)
    if handed.kind == "model":
      draft = conversion.convert_model(
        Path(fetch(str(handed.arguments["name"]))),
        "safetensors",
        folder / "drafter",
        dtype,
      )
      sizes = target_of(setup).vocab_size, draft.config.vocab_size
      tokenizers = checkpoints.load_tokenizer(source), draft.tokenizer
      checkpoints.check_vocabulary(*sizes, *tokenizers)
    elif handed.head is not None:
      learned = saved.load(saved.resolve(handed.arguments["file"]), target)
      described = conversion.describe_target(setup.target, target.config)
      described = described._replace(name=target_as or str(output / "target"))
      for engine in handover.served:
        path = folder / _folder(handed, engine, engines)
        layout = ENGINES[engine].layouts[handed.kind]
        _write_head(path, engine, layout, learned, described, dtype)
    for engine, served in handover.served.items():
      _write_json(folder / file_of(engine), served.config)
    document = _document(setup, handover, dtype, prices)
    _write_json(folder / NAME, document)

  files.replace_folder(output, fill)


def target_of(setup: Setup) -> TransformerConfig:
  """Reads the config of the target; refuses a shape alone."""
  if setup.target.startswith(PRESET):
    raise ValueError(f"{setup.target} is a shape alone; engines need weights")
  return setup.target_config()


def _write_head(
  folder: Path,
  engine: str,
  layout: str,
  learned: saved.Learned,
  target: formats.Target,
  dtype: str,
) -> None:
  """Writes a head in the layout and by the names that an engine reads."""
  head_config, ids, net, *_ = learned
  formats.save(folder, layout, head_config, ids, net, target, dtype)
  if layout == "eagle":  # SGLang has names of its own for the architectures
    ending = {"eagle": "Eagle", "eagle3": "Eagle3"}[head_config.kind]
    ending = ending if engine.startswith("sglang") else ""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = [f"LlamaForCausalLM{ending}"]
    _write_json(path, config)


def _document(
  setup: Setup, handover: Handover, dtype: str, prices: Prices | None
) -> dict:
  schedule = None
  if prices is not None:
    schedule = {
      "chip": prices.chip.name,
      "ways": prices.ways,
      "context": prices.context,
      "prefix_acceptance": prices.prefix_acceptance,
      "ranges": [list(one) for one in handover.schedule],
    }
  names = "target", "drafter", "acceptance", "shape", "temperature"
  return {
    "specdec": specdec.__version__,
    **{name: getattr(setup, name) for name in names},
    "k": setup.levels,
    "dtype": dtype,
    "schedule": schedule,
    "engines": {
      engine: {
        "keys_of": ENGINES[engine].keys,
        "config": served.config,
        "command": list(served.command),
        "environment": served.environment,
        "shell": served.shell,
        "warnings": list(served.warnings),
      }
      for engine, served in handover.served.items()
    },
    "refused": handover.refused,
  }


def _write_json(path: Path, content: dict) -> None:
  text = json.dumps(content, indent=2, allow_nan=False) + "\n"
  files.replace_file(path, text)
