"""The import order of DESIGN section 2, read off the sources."""

import ast
import pathlib

import pytest

import specdec

ROOT = pathlib.Path(specdec.__file__).parent

# What a room may import of specdec; the first prefix that fits it decides, and
# rooms that are not listed may import what they like, bar the bans below.
ALLOWED = {
  "types": (),
  "tree": ("types",),
  "sampling": ("types",),
  "cache": ("types",),
  "sharding": ("types",),
  "prefill": ("types", "cache"),
  "expand": ("types", "tree", "sampling", "cache"),
  "spelling": (),
  "models": (
    *("types", "tree", "cache", "sampling", "sharding", "models", "spelling"),
  ),
  "acceptance": ("types", "tree", "sampling", "acceptance"),
  "walk": ("types", "tree"),
  "accept": ("types", "tree", "sampling", "walk"),
  "rounds": ("types", "tree", "sampling", "cache", "accept"),
  "decode": ("types", "tree", "sampling", "cache", "prefill", "rounds"),
  "learned": (
    "types",
    "tree",
    "cache",
    "sampling",
    "sharding",
    "expand",
    "prefill",
    "models",
    "learned",
  ),
  "analysis": (
    "types",
    "tree",
    "models.config",
    "models.presets",
    "analysis",
    "run_folder",
    "display",
    "spelling",
  ),
}
DRAFTER_BANS = ("decode", "acceptance", "beam", "training", "checkpoints")
FOREIGN_BANS = ("ml_collections", "absl.flags", "pickle", "cloudpickle", "dill")


def imported(source: str, module: str) -> set[str]:
  """Dotted names that `source` imports; `from a import b` gives a.b."""
  names = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        package = module.split(".")[: -node.level]
        base = ".".join([*package, base] if base else package)
      names |= {f"{base}.{alias.name}" for alias in node.names}
  return names


def within(name: str, room: str) -> bool:
  return name == room or name.startswith(room + ".")


def faults(source: str, module: str) -> list[str]:
  """Imports of `module` (its dotted name) that the rules forbid."""
  room = module.removeprefix("specdec.")
  found = []
  for name in sorted(imported(source, module)):
    if any(within(name, ban) for ban in FOREIGN_BANS):
      found.append(name)
    if not within(name, "specdec"):
      continue
    other = name.removeprefix("specdec").removeprefix(".")
    allowed = next((ALLOWED[r] for r in ALLOWED if within(room, r)), None)
    if allowed is not None and not any(within(other, a) for a in allowed):
      found.append(name)
    if within(room, "drafters") and room != "drafters":
      another = within(other, "drafters")
      if another or any(within(other, ban) for ban in DRAFTER_BANS):
        found.append(name)
  return found


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


def test_the_core_is_there_to_be_checked():
  names = set(modules())
  for room in ("types", "tree", "sampling", "cache", "prefill", "decode"):
    assert f"specdec.{room}" in names


@pytest.mark.parametrize(
  "module, source, fault",
  [
    ("types", "from specdec import tree", "specdec.tree"),
    ("tree", "from specdec.sampling import warp", "specdec.sampling.warp"),
    ("cache", "import specdec.tree", "specdec.tree"),
    ("decode", "from specdec import drafters", "specdec.drafters"),
    ("decode", "from specdec.models import table", "specdec.models.table"),
    ("decode", "from . import acceptance", "specdec.acceptance"),
    ("models.x", "from specdec import decode", "specdec.decode"),
    (
      "acceptance.x",
      "def f():\n  from specdec.models.table import model",
      "specdec.models.table.model",
    ),
    ("learned.x", "from specdec import drafters", "specdec.drafters"),
    ("learned.x", "from specdec import decode", "specdec.decode"),
    ("drafters.x", "from specdec.drafters import model", None),
    ("drafters.x", "from .model import model", "specdec.drafters.model.model"),
    ("drafters.x", "from specdec.decode import run", "specdec.decode.run"),
    ("training.x", "import ml_collections", "ml_collections"),
    ("analysis.x", "from absl import flags", "absl.flags"),
    ("checkpoints.x", "import pickle", "pickle"),
    ("analysis.x", "from specdec.models import table", "specdec.models.table"),
  ],
)
def test_the_check_can_fail(module, source, fault):
  found = faults(source, f"specdec.{module}")
  assert found == [fault or "specdec.drafters.model"]


@pytest.mark.parametrize(
  "module, source",
  [
    ("types", "import jax\nfrom flax import struct"),
    ("models.x", "from specdec.models.config import TransformerConfig"),
    ("decode", "from specdec import cache as kv\nfrom specdec import prefill"),
    ("drafters.x", "from specdec import prefill, sampling, tree, types"),
    ("drafters", "from specdec.drafters.lookup import lookup"),
    ("learned.x", "from specdec import expand, prefill, sharding"),
    ("analysis.x", "from specdec.models.config import TransformerConfig"),
  ],
)
def test_the_check_lets_the_design_pass(module, source):
  assert faults(source, f"specdec.{module}") == []
