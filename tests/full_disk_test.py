"""A training run on a full disk ends in one sentence that names the folder."""

import json
import pathlib
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

import tiny_training
from specdec.training import loop, saving
from specdec.utils import files

TESTS = pathlib.Path(__file__).parent
TRAIN = """
import pathlib, resource, sys
folder = pathlib.Path(sys.argv.pop())
sys.path += {paths!r}
import tiny_training
from specdec.cli import app
from specdec.models import transformer
from specdec.training import objective
from specdec.training.run import train

def work(options):
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, -1))
  folder.mkdir()
  model = transformer.model(tiny_training.CONFIG)
  train(
    tiny_training.params(), None, objective.language_model(model),
    tiny_training.packed(), tiny_training.packed(1), tiny_training.OPTIONS,
    folder, export=lambda *_: None,
  )

app.Program("", lambda flags: None, work).launch(["train"])
"""


def run(code: str, folder: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs a program that is given a folder."""
  return subprocess.run(
    [sys.executable, "-c", code, folder],
    capture_output=True,
    text=True,
    timeout=300,
    cwd=TESTS.parent,
  )


CONVERT = """
import pathlib, resource, sys
import tiny_training
from specdec import checkpoints
from specdec.cli import app

folder = pathlib.Path(sys.argv.pop())

def work(options):
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, -1))
  checkpoints.save_orbax(
    folder, tiny_training.params(), tiny_training.CONFIG
  )

app.Program("", lambda flags: None, work).launch(["convert"])
"""


def test_an_orbax_model_that_does_not_fit_is_named_in_a_sentence(tmp_path):
  folder = tmp_path / "model"
  code = f"import sys; sys.path += {[str(TESTS)]!r}\n{CONVERT}"
  done = run(code, folder)
  assert done.returncode == 1
  assert done.stderr == (
    f"convert: {folder}/orbax could not be written: File too large\n"
  )


def test_a_checkpoint_that_does_not_fit_ends_a_run_in_a_sentence(tmp_path):
  code = TRAIN.format(paths=[str(TESTS)])
  folder = tmp_path / "run"
  done = run(code, folder)
  assert done.returncode == 1
  progress, error = done.stderr.rstrip("\n").rsplit("\n", 1)
  assert error == (
    f"train: {folder}/checkpoints could not be written: File too large"
  )
  for word in ("Traceback", "rror", "arning", "xception"):
    assert word not in progress
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines][:3] == [1, 2, 3]


@pytest.mark.parametrize(
  "error, written",
  [
    (OSError(5, "Input/output error"), "Input/output error"),
    (ValueError("RESOURCE_EXHAUSTED: [os_error_code='28']"), "No space left"),
    (RuntimeError("a write failed: Disk quota exceeded"), "a write failed"),
    (ValueError("mismatched trees"), None),
    (AttributeError("no attribute 'x'"), None),
  ],
)
def test_errors_of_the_disk_name_the_folder_and_others_pass(
  tmp_path, monkeypatch, error, written
):
  fail = mock.Mock(side_effect=error)
  checkpoints = saving.Checkpoints(tmp_path)
  monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
  kind = files.NotWritten if written else type(error)
  with pytest.raises(kind) as raised:
    checkpoints.newest()
  if written:
    assert re.search(f"checkpoints could not be .*{written}", str(raised.value))
  else:
    assert raised.value is error


def test_a_checkpoint_that_will_not_fit_is_not_begun(tmp_path, monkeypatch):
  checkpoints = saving.Checkpoints(tmp_path)
  optimizer = loop.make_optimizer(tiny_training.OPTIONS)
  state = loop.init(tiny_training.params(), optimizer)
  usage = files.shutil.disk_usage(tmp_path)
  with monkeypatch.context() as patch:
    full = usage._replace(free=100)
    patch.setattr(files.shutil, "disk_usage", lambda _: full)
    with pytest.raises(files.NotWritten) as raised:
      checkpoints.save(state)
  assert str(raised.value).startswith(
    f"{tmp_path}/checkpoints could not be written: a checkpoint takes "
  )
  assert checkpoints.newest() is None
  checkpoints.save(state)
  assert checkpoints.newest() == int(np.asarray(state.step))
  checkpoints.close()
