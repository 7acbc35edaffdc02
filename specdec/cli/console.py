"""The command `specdec NAME`: every program, without a checkout."""

import importlib
import pathlib
import sys
from collections.abc import Sequence

from specdec.utils import terminal
from specdec.utils.spelling import choices

_ALIASES = {"compare": "compare_drafters", "compile": "compile_tpu"}
_OTHERS = {"__init__", "app", "console", "flags"}


def programs() -> list[str]:
  """Returns the names of all programs: of all modules but those they share."""
  names = {path.stem for path in pathlib.Path(__file__).parent.glob("*.py")}
  return sorted(x for x in names - _OTHERS if not x.endswith("_flags"))


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the program that the first argument names."""
  argv = list(argv or sys.argv)
  name = argv[1] if len(argv) > 1 else "--help"
  name = _ALIASES.get(name, name)
  if name in ("--help", "-h", "help"):
    print("specdec NAME --help says more of one of\n")
    for name in programs():
      module = importlib.import_module(f"specdec.cli.{name}")
      print(f"  {name:17} {module.__doc__.strip().splitlines()[0]}")
    for alias, name in _ALIASES.items():
      print(f"\n{alias} is {name}", end="")
    print()
    return
  if name not in programs():
    sys.exit(terminal.escape(f"specdec: {name}; {choices(name, programs())}"))
  program = importlib.import_module(f"specdec.cli.{name}").main
  program.launch([f"specdec {name}", *argv[2:]])


if __name__ == "__main__":
  main()
