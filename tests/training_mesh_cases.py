"""Drafters trained on eight virtual devices; run by training_mesh_test.py.

Losses of every step, of held-out texts and of decoding are one device's, and
a run that is stopped goes on upon another mesh.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
from learned_kinds import KINDS, TARGET, draft_head
from specdec import checkpoints, sharding
from specdec.checkpoints import learned as saved
from specdec.models import transformer
from specdec.training import (
  data,
  placing,
  run,
  train_drafter,
  train_joint,
)
from specdec.training import objective as objectives
from specdec.training.options import Options
from specdec.training.setup import from_config
from specdec.types import Source
from tiny_training import DECODING, Killed, log

SHAPE = dict(width=16, mlp_width=32, num_heads=4, num_kv_heads=2, head_dim=8)
OPTIONS = dict(
  steps=4, batch=8, sequence=10, warmup=1, learning_rate=1e-3, log_every=1,
  eval_every=4, save_every=2, eval_sequences=12, accumulate=1,
)  # fmt: skip
ONE = "data:1"
HEADS = {
  "eagle3": dict(features=(0, 2), vocabulary=11),
  "published_eagle3": dict(
    kind="eagle3", features=(0, 1, 2), layout="published", vocabulary=16
  ),
  "mtp": dict(head="shared", vocabulary=12),
  "medusa": dict(num_layers=0),
  "prophet": dict(head="shared"),
}
CASES = [  # head, mesh, devices that share its weights
  ("eagle3", "data:4,model:2", None),
  ("published_eagle3", "data:2,model:4", None),
  ("mtp", "data:8", None),
  ("medusa", "data:2,model:4", 2),
  ("prophet", "data:4,model:2", 1),
]
JOINT = {
  "mtp": dict(
    head_config=dict(kind="mtp", levels=2, head="shared", **SHAPE),
    loss=dict(divergence="cross_entropy", token_weight=0.3),
  ),
  "layer_skip": dict(
    layer_skip=dict(dropout=0.5, rotation=2),
    decoding=DECODING | dict(exit_layer=1),
  ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  folder = tmp_path_factory.mktemp("place")
  (folder / "target").mkdir()
  programs.write_model(folder / "target", vocab_size=32, **SHAPE)
  (folder / "target" / "tokenizer_config.json").write_text('{"eos_token": "z"}')
  words = np.random.default_rng(0).permutation("the cat sat on a mat".split() * 40)
  (folder / "text").write_text(" ".join(words))
  return folder


def entries(place, head, **options):
  return dict(
    target=str(place / "target"),
    data=str(place / "text"),
    held_out=str(place / "text"),
    head_config=dict(kind=head, levels=2) | SHAPE | HEADS[head],
    loss=dict(divergence="forward_kl"),
    options=OPTIONS | options,
    decoding=DECODING,
  )


def joint_entries(place, kind):
  shared = dict(
    tokenizer=str(place / "target"),
    data=str(place / "text"),
    held_out=str(place / "text"),
    model=dict(vocab_size=32, num_layers=2, **SHAPE),
    options=OPTIONS,
    decoding=DECODING,
  )
  return shared | JOINT[kind]


def trained(place, name, setup, mesh, ways=None, stop=None):
  """The run's log; it is killed before step `stop`."""
  setup, folder = from_config(setup), place / name
  train = train_joint if hasattr(setup, "model") else train_drafter
  honest = data.Packed.batch

  def batch(self, step, size):
    if step == stop:
      raise Killed
    return honest(self, step, size)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data.Packed, "batch", batch)
    train.train(setup, folder, mesh, ways)
  return log(folder)


def assert_same(ours, theirs):
  assert len(ours) == len(theirs) > 5
  for one, other in zip(ours, theirs):
    assert one.keys() == other.keys()
    for name in one:
      if name != "kind":
        np.testing.assert_allclose(
          one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.fixture(scope="module")
def alone(place):
  """Logs of one device, by head."""
  logs = {}

  def of(head):
    if head not in logs:
      name = f"{head}_alone"
      logs[head] = trained(place, name, entries(place, head), ONE)
    return logs[head]

  return of


@pytest.mark.parametrize("head, mesh, ways", CASES)
def test_eight_devices_train_as_one(place, alone, head, mesh, ways):
  ours = trained(place, f"{head}_meshed", entries(place, head), mesh, ways)
  assert_same(ours, alone(head))
