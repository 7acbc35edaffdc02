"""The import order of docs/design.md, read off the sources."""

import ast
import functools
import importlib.util
import pathlib

import pytest

import specdec

ROOT = pathlib.Path(specdec.__file__).parent

# What every room may import of specdec, itself aside. A module that lies
# directly in specdec/ is a room of its own; a prefix speaks for all below it.
_CORE = "types draft_tree noise sampling cache sharding"
_CACHED = "utils.constructors"
_MODELS = f"{_CORE} models utils multihost"
_LOOP = f"{_MODELS} draft_shape traversal stats step decode inputs acceptance"
_TOOLS = f"{_LOOP} draft_length testing drafters roofline checkpoints"
ALLOWED = {
  "__init__": "types sampling decode acceptance drafters",
  "types": "",
  "draft_tree": "types",
  "noise": "types",
  "sampling": "types",
  "cache": "types",
  "sharding": "types",
  "multihost": "",
  "utils": "types multihost",
  "traversal": "types draft_tree",
  "draft_length": f"types draft_shape {_CACHED}",
  "draft_shape": f"types draft_tree sampling {_CACHED}",
  "stats": "types draft_tree traversal",
  "models": (
    f"{_CORE} utils.calls utils.spelling utils.terminal utils.huge_pages "
    f"{_CACHED}"
  ),
  "acceptance": f"types draft_tree sampling {_CACHED}",
  "step": f"{_CORE} traversal stats utils.loops",
  "inputs": "types draft_tree sampling",
  "decode": f"{_CORE} step inputs multihost",
  "slots": "types decode inputs",
  "beam": f"{_CORE} beam_step beam_traversal decode inputs step",
  "beam_step": "types",
  "beam_traversal": "types traversal beam_step",
  "drafters": f"{_CORE} draft_shape draft_length models utils.spelling "
  f"utils.kinds utils.loops {_CACHED}",
  "testing": f"{_MODELS} draft_shape traversal acceptance step decode inputs "
  "slots compiled.hlo",
  "roofline": "types draft_tree sharding models.config models.params "
  "models.presets utils",
  "checkpoints": f"{_MODELS} drafters",
  "compiled": _TOOLS,
  "benchmark": f"{_TOOLS} beam slots compiled",
  "training": f"{_TOOLS} benchmark compiled",
  "report": f"{_TOOLS} benchmark compiled",
  "cli": f"{_TOOLS} beam benchmark compiled training report",
  "__main__": "cli",
}
# What drafters share, which is no drafter by itself.
SHARED = {"cost", "draft_head", "serve"}
SHARED |= {"head_config", "head_kinds", "head_presets"}
SHARED |= {
  "mask_slots",
  "sample_model",
  "suffix_index",
  "text_match",
  "token_map",
}
SHARED |= {"mask_slots", "projection", "successor", "unroll", "vocabulary"}
SHARED |= {
  f"block_{name}" for name in ("config", "cost", "head", "serve", "unroll")
}
FOREIGN_BANS = ("ml_collections", "absl", "pickle", "cloudpickle", "dill")
FLAG_LIBRARIES = ("ml_collections", "absl")  # of cli alone
UNPICKLER = "specdec.checkpoints.formats.pickled"  # runs nothing that it reads


def imported(source: str, module: str) -> set[str]:
  """Dotted names that `source` imports; `from a import b` gives a.b."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = "." * node.level + (node.module or "")
      base = importlib.util.resolve_name(base, module.rpartition(".")[0])
      names |= {f"{base}.{alias.name}" for alias in node.names}
  return names


def within(name: str, room: str) -> bool:
  return name == room or name.startswith(room + ".")


def room_of(module: str) -> str:
  """The first part of a module's name below specdec."""
  return module.removeprefix("specdec.").partition(".")[0]


def is_drafter(module: str) -> bool:
  """Whether a module below specdec.drafters holds a drafter."""
  name = module.removeprefix("specdec.drafters").removeprefix(".heads")
  return name.strip(".").partition(".")[0] not in ("", *SHARED)


def faults(source: str, module: str) -> list[str]:
  """Imports of `module` (its dotted name) that the rules forbid."""
  room = room_of(module)
  bans = {*FOREIGN_BANS} - {*(FLAG_LIBRARIES if room == "cli" else ())}
  bans -= {"pickle"} if module == UNPICKLER else set()
  rooms = room, *ALLOWED[room].split()
  package = module in ("specdec.drafters", "specdec.drafters.heads")

  def is_forbidden(name: str) -> bool:
    if not within(name, "specdec"):
      return any(within(name, ban) for ban in bans)
    if name == "specdec":  # its version
      return False
    if room == room_of(name) == "drafters" and not package:
      return is_drafter(name)
    other = name.removeprefix("specdec.")
    return not any(within(other, open_) for open_ in rooms)

  return [*filter(is_forbidden, sorted(imported(source, module)))]


@functools.cache
def modules() -> dict[str, str]:
  """Dotted name -> source; a package is named like its folder."""
  sources = {}
  for path in sorted(ROOT.rglob("*.py")):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    if parts[-1] == "__init__":
      parts = (*parts[:-1], "__init__") if len(parts) == 2 else parts[:-1]
    sources[".".join(parts)] = path.read_text()
  return sources


@pytest.mark.parametrize("module", modules())
def test_import_order(module):
  assert faults(modules()[module], module) == []


def test_every_room_is_constrained():
  assert {room_of(name) for name in modules()} == {*ALLOWED}


@pytest.mark.parametrize(
  "module, source, fault",
  [
    ("types", "import jax\nfrom flax import struct", None),
    ("types", "from specdec import draft_tree", "specdec.draft_tree"),
    ("cache", "import specdec.draft_tree", "specdec.draft_tree"),
    ("decode", "from specdec import cache as kv\nimport specdec.step", None),
    ("decode", "from specdec import drafters", "specdec.drafters"),
    ("step", "from . import acceptance", "specdec.acceptance"),
    ("models.x", "from specdec import decode", "specdec.decode"),
    ("acceptance.x", "if 1:\n  import specdec.models", "specdec.models"),
    ("drafters", "from specdec.drafters.lookup import lookup", None),
    ("drafters.x", "from specdec import cache, sampling, types", None),
    ("drafters.x", "from specdec.drafters import x", "specdec.drafters.x"),
    ("drafters.x", "from .model import x", "specdec.drafters.model.x"),
    ("drafters.x", "from specdec.decode import run", "specdec.decode.run"),
    ("drafters.heads.x", "from specdec.drafters.heads import draft_head", None),
    ("drafters.heads.x", "from .mtp import x", "specdec.drafters.heads.mtp.x"),
    ("roofline.x", "from specdec.models.config import TransformerConfig", None),
    ("roofline.x", "from specdec import benchmark", "specdec.benchmark"),
    ("roofline.x", "from absl import flags", "absl.flags"),
    ("benchmark.x", "from specdec import report", "specdec.report"),
    ("benchmark.x", "from specdec.cli import app", "specdec.cli.app"),
    ("utils.x", "from specdec import checkpoints", "specdec.checkpoints"),
    ("training.x", "import ml_collections", "ml_collections"),
    ("cli.x", "from absl import flags\nimport ml_collections", None),
    ("cli.x", "import pickle", "pickle"),
  ],
)
def test_the_check_finds_what_the_design_forbids(module, source, fault):
  assert faults(source, f"specdec.{module}") == ([fault] if fault else [])
