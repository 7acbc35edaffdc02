"""What the tests of training share: a tiny model, learnable text, kills."""

import json
import os
import subprocess
import sys
import time

import jax
import numpy as np

import programs
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import data, run
from specdec.training.options import Options

CONFIG = TransformerConfig(
  vocab_size=17,
  num_layers=1,
  width=8,
  mlp_width=12,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  tied=True,
)
OPTIONS = Options(
  steps=12,
  batch=4,
  sequence=6,
  warmup=2,
  log_every=1,
  eval_every=4,
  save_every=3,
  eval_sequences=8,
)
# Entries of configs for the programs.
SHAPE = dict(width=16, mlp_width=24, num_heads=2, num_kv_heads=1, head_dim=8)
STEPS = dict(
  steps=12,
  batch=4,
  sequence=16,
  warmup=2,
  log_every=1,
  eval_every=6,
  save_every=4,
  eval_sequences=4,
)
DECODING = dict(k=2, prompts=4, length=8, new_tokens=8, temperature=0.0)


def params(seed=0):
  return transformer.init_params(CONFIG, jax.random.key(seed))


def stream(size=200, seed=0):
  # Every token says much about the next: there is something to learn.
  rng = np.random.default_rng(seed)
  steps = rng.choice([1, 2], size, p=[0.9, 0.1])
  return (np.cumsum(steps) % CONFIG.vocab_size).astype(np.int32)


def packed(seed=0):
  return data.Packed(stream(seed=seed), OPTIONS.sequence)


class Killed(BaseException):
  """Stands for a kill: nothing catches it."""


def train(
  folder,
  weights,
  objective,
  kill_at=None,
  batches=None,
  killed=Killed,
  **options,
):
  """Runs the loop; `killed` is raised before step `kill_at`, counted from 0.

  Returns:
    The weights, and those that were exported, by name.
  """
  batches, exported = batches or packed(), {}
  serve = batches.batch

  def batch(step, size):
    if step == kill_at:
      raise killed
    return serve(step, size)

  batches.batch = batch
  trained = run.train(
    weights,
    None,
    objective,
    batches,
    packed(seed=1),
    OPTIONS,
    folder,
    export=lambda tree, name: exported.update(
      {name: jax.tree.map(np.array, tree)}
    ),
    **options,
  )
  return trained, exported


def log(folder, kind=None):
  """The entries of a run's log."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [x for x in map(json.loads, lines) if kind in (None, x["kind"])]


def write_letters(folder, seed=0):
  """Writes a random model whose tokens are letters; `z` ends a text."""
  folder.mkdir()
  programs.write_model(folder, seed)
  (folder / "tokenizer_config.json").write_text('{"eos_token": "z"}')
  return folder


def write_config(path, **entries):
  """A file for --config; returns the flag."""
  path.write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    f"  return config_dict.ConfigDict({entries!r})\n"
  )
  return f"--config={path}"


def run_program(place, name, **entries):
  """Runs train.py in place/name; returns that folder."""
  config, folder = write_config(place / f"{name}.py", **entries), place / name
  programs.run("train", config, f"--folder={folder}")
  return folder


def assert_kills_change_nothing(place, files, kills=(20,), **entries):
  """Kills a run of train.py, and compares what it leaves at its end.

  Args:
    files: of the run's folder.
    kills: the number of lines in the log at each of them.
  """
  entries["options"] = STEPS | dict(steps=60, save_every=7)
  whole = run_program(place, "whole", **entries)
  folder, path = place / "killed", place / "killed" / "metrics.jsonl"
  for num_lines in kills:
    process = subprocess.Popen(
      [sys.executable, programs.SCRIPTS / "train.py",
       f"--config={place / 'whole.py'}", f"--folder={folder}"],
      env=os.environ | {"PYTHONPATH": str(programs.SCRIPTS.parent)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not path.is_file() or len(path.read_text().splitlines()) < num_lines:
      assert process.poll() is None
      time.sleep(0.02)
    process.kill()
    process.wait()
  run_program(place, "killed", **entries)
  for name in files:
    assert (whole / name).read_bytes() == (folder / name).read_bytes(), name


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)
