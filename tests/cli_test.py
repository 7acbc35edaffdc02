"""Every program: its help page, its size, its launcher, and how errors end."""

import importlib
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import textwrap

import pytest

import programs
from specdec.checkpoints.fetch import PACKAGES
from specdec.cli import app, console, flags

ROOT = programs.SCRIPTS.parent
MOST_LINES = 150
TPU = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")
LAUNCHER = '''"""Runs specdec.cli.{name}; `--help` says what it does."""

from specdec.cli.{name} import main

if __name__ == "__main__":
  main.launch()
'''


@pytest.mark.parametrize("value", [[2.7, 3], (True,), [], 2.5])
def test_lists_of_a_config_hold_integers(value):
  assert flags.Integers().parse([3, 2, 3]) == (3, 2)
  with pytest.raises(ValueError, match="no integer and no list of them"):
    flags.Integers(auto=True).parse(value)


@pytest.mark.parametrize("name", console.programs())
def test_a_program_is_a_short_module_with_help_and_a_launcher(name, capsys):
  module = importlib.import_module(f"specdec.cli.{name}")
  module.main([f"scripts/{name}.py", "--help"])
  page = capsys.readouterr().out
  assert page.startswith(textwrap.dedent(module.__doc__).strip())
  defined = {*module.main.flag_values([name])}
  listed = re.findall(r"^\s*--(?:\[no\])?(\w+):", page, re.M)
  assert sorted(listed) == sorted(defined)
  text = module.__doc__.replace("\\\n", " ")
  given = {
    flag
    for command in re.findall(rf"scripts/{name}\.py(.*)", text)
    for flag in re.findall(r"(?<= )--(?:no)?(\w+)", command)
  }
  assert given <= defined
  lines = pathlib.Path(module.__file__).read_text().splitlines()
  assert len(lines) <= MOST_LINES
  launcher = programs.SCRIPTS / f"{name}.py"
  assert launcher.read_text() == LAUNCHER.format(name=name)


def test_specdec_lists_every_program(capsys):
  console.main(["specdec", "--help"])
  listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.M)
  assert listed == console.programs()


def test_no_program_reads_the_global_flags():
  sources = {x.name: x.read_text() for x in (ROOT / "specdec/cli").glob("*.py")}
  users = [name for name, text in sources.items() if "flags.FLAGS" in text]
  assert users == ["app.py"]  # which marks absl's as parsed


@pytest.mark.parametrize(
  "skip, devices, kind, quiet",
  [
    ("1", [], None, True),  # JAX found no chip
    (None, [], None, False),  # it found some
    ("true", [], None, False),  # somebody else set it
    ("1", ["/dev/accel0"], None, False),
    ("1", ["/dev/vfio/0"], None, False),
    ("1", [], "v6e-8", True),  # what was given stays
  ],
)
def test_libtpu_is_quiet_only_where_there_is_no_tpu(
  monkeypatch, skip, devices, kind, quiet
):
  monkeypatch.setattr(
    app.glob,
    "glob",
    lambda pattern: [x for x in devices if x.startswith(pattern[:8])],
  )
  values = {"TPU_SKIP_MDS_QUERY": skip, TPU[0]: kind, TPU[1]: None}
  environment = {name: x for name, x in values.items() if x is not None}
  monkeypatch.setattr(os, "environ", environment)
  app._quiet_libtpu()
  assert environment.get(TPU[0]) == (kind or ("v5litepod-1" if quiet else None))
  assert environment.get(TPU[1]) == ("localhost" if quiet else None)


def test_the_config_of_flags_names_a_model_that_chats():
  config = runpy.run_path(str(ROOT / "configs/lookup.py"))["get_config"]()
  assert config.chat and config.target in PACKAGES


def test_convert_prints_where_a_model_is(tmp_path, capsys):
  programs.run("convert", f"--source={tmp_path}")
  assert capsys.readouterr().out.strip() == str(tmp_path)


def test_python_m_specdec_is_the_command(monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["specdec", "--help"])
  runpy.run_module("specdec", run_name="__main__")
  assert capsys.readouterr().out.startswith("specdec NAME --help")


def test_sigterm_ends_a_program_as_ctrl_c_does():
  script = (
    "import time\nfrom specdec.cli import app\n"
    "work = lambda options: (print('works', flush=True), time.sleep(60))\n"
    "app.Program('x', lambda flags: None, work, interrupted='goes on later')"
    ".launch(['waits'])\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", script],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "works\n"
  process.send_signal(signal.SIGTERM)
  assert process.communicate()[1].strip() == "waits: goes on later"
  assert process.returncode == 1


def test_a_wrong_command_prints_nothing_else():
  path = os.environ | {"PYTHONPATH": str(ROOT)}
  ended = programs.launch("train", "--fodler=a", env=path)
  assert ended.returncode == 1 and not ended.stdout
  assert ended.stderr.startswith("train: Unknown command line flag 'fodler'")
  assert ended.stderr.count("\n") == 1
