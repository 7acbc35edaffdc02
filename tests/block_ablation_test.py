"""Ablations that keep block drafters honest: each mistake in training costs.

  XLA_FLAGS= python -m pytest -n 0 -s -m slow tests/block_ablation_test.py

DFlash on the shipped target, by the real trainer, with equal steps, tokens and
seed. Measured as it is served: by decoding, and by the length that a round
would accept of held-out text. What the run's own log says of that length stands
beside it: a mistake in training is one in the log, too, and a leak looks good.
"""

import contextlib
import runpy
import shutil
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import block_plants
import programs
from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head
from specdec.models import transformer
from specdec.training import corpus, data, drafting, evaluate, train_drafter
from specdec.training.setup import Decoding, HeadSetup, from_config
from specdec.types import Params
from tiny_training import log

K = 15  # of few slots the mask among them says little
DECODING = dict(k=K, prompts=128, length=64, new_tokens=128)
# Muon: so few steps of AdamW teach too little to lose. Of half as many steps
# seeds differ by more than half of MARGIN.
OPTIONS = dict(
  steps=800,
  batch=4,
  optimizer="muon",
  learning_rate=1e-2,
  eval_every=800,
  save_every=800,
)
# In tokens. Another seed makes less than half of it; an ablation costs more.
MARGIN = 0.2


class Case(NamedTuple):
  """A way of training, and of serving what was trained."""

  plant: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
  seed: int = 0
  causal: bool = False  # the block's mask in training; it is served with a full
  blind: bool = False  # decodes without context


class Lengths(NamedTuple):
  """Mean tokens of a case."""

  greedy: float  # a target step
  sampled: float  # the same at temperature 1
  accepted_length: float  # of held-out text
  logged: float  # the same in the log of training


HONEST = {"honest": Case(), "honest, another seed": Case(seed=1)}
LEAK = "context with the anchor"
ABLATIONS = {
  "targets a token too far": Case(block_plants.train_a_token_too_far),
  "no context": Case(block_plants.train_no_context, blind=True),
  LEAK: Case(block_plants.train_its_own_position),
  "trained causal, served full": Case(causal=True),
}


def setup_of(case: Case, folder) -> HeadSetup:
  """configs/train/drafter.py:dflash, shortened."""
  path = programs.SCRIPTS.parent / "configs" / "train" / "drafter.py"
  config = runpy.run_path(str(path))["get_config"]("dflash")
  config.update(
    data=str(folder / "corpus" / "train"),
    held_out=str(folder / "corpus" / "held_out"),
    cache=str(folder / "states"),
  )
  config.options.update(OPTIONS, seed=case.seed)
  config.decoding.update(prompts=1, length=8, new_tokens=8)
  config.head_config.levels = K
  config.head_config.block.causal = case.causal
  return from_config(config.to_dict())


@contextlib.contextmanager
def planted(plant):
  """Nothing that was traced before or with the mistake is used beyond it."""
  jax.clear_caches()
  with pytest.MonkeyPatch.context() as patch:
    plant(patch)
    yield
  jax.clear_caches()


def measure(case: Case, setup: HeadSetup, run, target, held_out) -> Lengths:
  """Serves a run's drafter."""
  saved = learned.load(run / "last.safetensors", target)
  if case.causal:
    served = block_plants.other_mask(saved.head_config)
    saved = saved._replace(head_config=served)
  head = saved.draft_head(target.config)
  model = transformer.model(target.config)
  drafter = drafters.from_head(head, model, draft_shape.chain(K))
  if case.blind:
    drafter = block_plants.served_without_context(drafter)
  weights = draft_head.weights_of(head, saved.net, target.params)
  decoded = [
    evaluate.acceptance_by_decoding(
      model, drafter, held_out, Decoding(**DECODING, temperature=temperature)
    )(Params(target.params, weights))["tokens_per_pass"]
    for temperature in (0.0, 1.0)
  ]
  objective = jax.jit(drafting.objective(head, model, setup.loss))
  rows = held_out.evenly_spaced(64).reshape(16, 4, -1)
  with planted(case.plant if case.blind else Case().plant):
    lengths = [
      objective(saved.net, target.params, jnp.asarray(x))[1]["accepted_length"]
      for x in rows
    ]
  logged = log(run, "held_out")[-1]["accepted_length"]
  return Lengths(*decoded, float(np.mean(lengths)), logged)


@pytest.mark.slow
def test_each_falls(tmp_path):
  corpus.write(tmp_path / "corpus")
  target, table = checkpoints.load(fetch("stdlib-11m")), {}
  for name, case in (HONEST | ABLATIONS).items():
    setup, run = setup_of(case, tmp_path), tmp_path / name
    with planted(case.plant):
      train_drafter.train(setup, run)
    _, held_out = data.load(
      setup.data, setup.held_out, setup.options, target.tokenizer
    )
    table[name] = measure(case, setup, run, target, held_out)
    print(f"{name:28}", *(f"{x:6.3f}" for x in table[name]), flush=True)
  shutil.rmtree(tmp_path / "states")
  first, second = (np.array(table[name][:3]) for name in HONEST)
  assert np.all(np.abs(first - second) < MARGIN / 2)
  lowest = np.minimum(first, second)
  fallen = {
    name: bool(np.all(lowest - table[name][:3] > MARGIN)) for name in ABLATIONS
  }
  assert all(fallen.values()), (fallen, table)
  # By its own log the drafter that sees too much is the best of all.
  assert max(table, key=lambda name: table[name].logged) == LEAK
