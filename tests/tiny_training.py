"""What the tests of training share: a tiny model and text worth learning."""

import os
import subprocess
import sys
import time

import jax
import numpy as np

import programs
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import data
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


def params(seed=0):
  return transformer.init_params(CONFIG, jax.random.key(seed))


def stream(size=200, seed=0):
  # Every token says much about the next: there is something to learn.
  rng = np.random.default_rng(seed)
  steps = rng.choice([1, 2], size, p=[0.9, 0.1])
  return (np.cumsum(steps) % CONFIG.vocab_size).astype(np.int32)


def packed(seed=0):
  return data.Packed(stream(seed=seed), OPTIONS.sequence)


def write_config(path, **entries):
  """A file for --config; returns the flag."""
  path.write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    f"  return config_dict.ConfigDict({entries!r})\n"
  )
  return f"--config={path}"


def run_killed(name, config, folder, num_lines):
  """Runs a program; kills it once its log has so many lines."""
  process = subprocess.Popen(
    [sys.executable, programs.SCRIPTS / f"{name}.py", config,
     f"--folder={folder}"],
    env=os.environ | {"PYTHONPATH": str(programs.SCRIPTS.parent)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )  # fmt: skip
  log = folder / "metrics.jsonl"
  while not log.is_file() or len(log.read_text().splitlines()) < num_lines:
    assert process.poll() is None
    time.sleep(0.02)
  process.kill()
  process.wait()


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)
