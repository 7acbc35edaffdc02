"""What the tests of training share: a tiny model and text worth learning."""

import jax
import numpy as np

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


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)
