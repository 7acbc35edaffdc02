"""Every program: its help page, its size, its launcher, and who reads flags."""

import importlib
import pathlib
import re
import textwrap

import pytest

import programs
from imports_test import FLAG_LIBRARIES, faults
from specdec.cli import app, console

ROOT = programs.SCRIPTS.parent
MOST_LINES = 150
LAUNCHER = '''"""Runs specdec.cli.{name}; `--help` says what it does."""

from specdec.cli.{name} import main

if __name__ == "__main__":
  main.launch()
'''


def module_of(name: str):
  return importlib.import_module(f"specdec.cli.{name}")


@pytest.mark.parametrize("name", console.programs())
def test_help_begins_with_the_docstring_and_has_every_flag(name, capsys):
  module = module_of(name)
  module.main([f"scripts/{name}.py", "--help"])
  page = capsys.readouterr().out
  assert page.startswith(textwrap.dedent(module.__doc__).strip())
  defined = app.Flags([name])
  module.main.define(defined)
  listed = re.findall(r"^\s*--(?:\[no\])?(\w+):", page, re.M)
  assert sorted(listed) == sorted(defined.values)


@pytest.mark.parametrize("name", console.programs())
def test_a_program_is_a_short_module_and_a_launcher(name):
  lines = pathlib.Path(module_of(name).__file__).read_text().splitlines()
  assert len(lines) <= MOST_LINES
  launcher = programs.SCRIPTS / f"{name}.py"
  assert launcher.read_text() == LAUNCHER.format(name=name)


@pytest.mark.parametrize("name", console.programs())
def test_a_docstring_names_flags_that_exist(name):
  """In its commands; those of other programs are theirs."""
  module = module_of(name)
  defined = app.Flags([name])
  module.main.define(defined)
  text = module.__doc__.replace("\\\n", " ")
  given = {
    flag
    for command in re.findall(rf"scripts/{name}\.py(.*)", text)
    for flag in re.findall(r"(?<= )--(?:no)?(\w+)", command)
  }
  assert given <= {*defined.values}


def test_specdec_lists_every_program(capsys):
  console.main(["specdec", "--help"])
  listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.M)
  assert listed == console.programs()


@pytest.mark.parametrize("library", FLAG_LIBRARIES)
@pytest.mark.parametrize("room", ["benchmark", "training", "report"])
def test_a_module_outside_cli_that_reads_flags_is_caught(room, library):
  assert faults(f"from {library} import x", f"specdec.{room}.x")
  assert not faults(f"from {library} import x", "specdec.cli.x")
  assert faults("from specdec.cli import app", f"specdec.{room}.x")


def test_no_program_reads_the_global_flags():
  sources = {x.name: x.read_text() for x in (ROOT / "specdec/cli").glob("*.py")}
  users = [name for name, text in sources.items() if "flags.FLAGS" in text]
  assert users == ["app.py"]  # which marks absl's as parsed
