"""What every program does around its own work."""

import os
import subprocess
import sys

import pytest

import programs
from specdec.cli import app

NAMES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


@pytest.mark.parametrize(
  "skip, devices, own, quiet",
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
  monkeypatch, skip, devices, own, quiet
):
  monkeypatch.setattr(
    app.glob,
    "glob",
    lambda pattern: [x for x in devices if x.startswith(pattern[:8])],
  )
  values = {"TPU_SKIP_MDS_QUERY": skip, NAMES[0]: own, NAMES[1]: None}
  environment = {name: x for name, x in values.items() if x is not None}
  monkeypatch.setattr(os, "environ", environment)
  app._quiet_libtpu()
  assert environment.get(NAMES[0]) == (
    own or ("v5litepod-1" if quiet else None)
  )
  assert environment.get(NAMES[1]) == ("localhost" if quiet else None)


@pytest.mark.parametrize(
  "program, arguments, sentence",
  [
    (
      "train",
      ["--config=configs/train/target.py", "--config.options.stpes=3"],
      "--config.options.stpes: did you mean steps",
    ),
    (
      "train",
      ["--config=configs/train/target.py", "--config.options.steps.a=3"],
      "--config.options.steps.a: no entry 'a'\n",
    ),
    (
      "train",
      ["--config=configs/train/draft.py:9m"],
      "flag --config=configs/train/draft.py:9m: its get_config() cannot be "
      "used: ValueError: size '9m' is unknown; known: 0.3m",
    ),
    ("train", ["--fodler=a"], "Unknown command line flag 'fodler'. Did you"),
    ("generate", ["stray", "arguments"], "unexpected argument 'stray';"),
  ],
)
def test_a_wrong_command_ends_in_one_sentence(program, arguments, sentence):
  root = programs.SCRIPTS.parent
  ended = subprocess.run(
    [sys.executable, f"scripts/{program}.py", *arguments],
    cwd=root,
    env={**os.environ, "PYTHONPATH": str(root)},
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 1 and not ended.stdout
  assert ended.stderr.startswith(f"{program}: {sentence}"), ended.stderr
  assert ended.stderr.count("\n") == 1
