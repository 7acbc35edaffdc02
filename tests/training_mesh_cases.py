"""Training on eight virtual devices; run by training_mesh_test.py.

Losses of every step and of held-out texts are one device's, and a run that is
stopped goes on upon another mesh.
"""

import jax
import numpy as np
import pytest

import tiny_training
from specdec import checkpoints
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import (
  data,
  drafting,
  placing,
  run,
)
from specdec.training.options import Options
from tiny_training import Killed, log

SHAPE = dict(width=16, mlp_width=32, num_heads=4, num_kv_heads=2, head_dim=8)
SLOW = pytest.mark.slow
OPTIONS = dict(
  steps=4,
  batch=8,
  sequence=10,
  warmup=1,
  learning_rate=1e-3,
  log_every=1,
  eval_every=4,
  save_every=2,
  eval_sequences=12,
)
ONE = "data:1"
CONFIG = TransformerConfig(vocab_size=32, num_layers=2, **SHAPE)
HEADS = {
  "eagle3": dict(features=(0, 2), vocabulary=11),
  "published_eagle3": dict(
    kind="eagle3", features=(0, 1, 2), layout="published", vocabulary=16
  ),
  "mtp": dict(head="shared", vocabulary=12),
  "medusa": dict(num_layers=0),
  "prophet": dict(head="shared"),
}


def head_entries(head):
  return dict(kind=head, levels=2) | SHAPE | HEADS[head]


def killing(patch, stop):
  """Makes the batch of a step kill the run."""
  honest = data.Packed.batch

  def batch(self, step, size):
    if step == stop:
      raise Killed
    return honest(self, step, size)

  patch.setattr(data.Packed, "batch", batch)


def run_head(folder, head, mesh, ways=None, stop=None):
  """Trains a head and is not evaluated by decoding; returns its log.

  Args:
    stop: step before which it is killed; None: never.
  """
  options, head_config = Options(**OPTIONS), HeadConfig(**head_entries(head))
  where = placing.places(mesh, CONFIG, head_config, options, ways)
  target = checkpoints.random_checkpoint(CONFIG, 0, place=where.target)
  model = transformer.model(CONFIG, where.target)
  ids = np.arange(head_config.vocabulary) if head_config.vocabulary else None
  serving, unrolled = placing.heads(head_config, CONFIG, ids, where.draft)
  net = placing.put(unrolled, serving.init(jax.random.key(1)), where.draft)
  packed = data.Packed(tiny_training.stream(), options.sequence)
  with pytest.MonkeyPatch.context() as patch:
    killing(patch, stop)
    run.train(
      net,
      target.params,
      drafting.objective(unrolled, model, drafting.Loss()),
      packed,
      packed,
      options,
      folder,
      export=lambda *_: None,
      where=where.draft and placing.shardings(unrolled, net, where.draft),
    )
  return log(folder)


def assert_same(ours, theirs):
  assert len(ours) == len(theirs) > 4
  for one, other in zip(ours, theirs):
    assert one.keys() == other.keys()
    for name in {*one} - {"kind"}:
      np.testing.assert_allclose(
        one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name
      )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """(head) -> its log of one device."""
  logs, folder = {}, tmp_path_factory.mktemp("alone")

  def of(head):
    if head not in logs:
      logs[head] = run_head(folder / head, head, ONE)
    return logs[head]

  return of


@pytest.mark.parametrize(
  "head, mesh, ways",
  [
    ("eagle3", "data:2,model:4", 2),
    ("published_eagle3", "data:2,model:4", None),
    ("mtp", "data:8", None),
    ("medusa", "data:4,model:2", None),
    ("prophet", "data:4,model:2", 1),
    pytest.param("eagle3", "model:8", 4, marks=SLOW),
    pytest.param("published_eagle3", "data:8", None, marks=SLOW),
    pytest.param("prophet", "data:2,model:4", None, marks=SLOW),
  ],
)
def test_heads_learn_on_eight_devices_as_on_one(
  tmp_path, alone, head, mesh, ways
):
  assert_same(run_head(tmp_path, head, mesh, ways), alone(head))


@pytest.mark.parametrize(
  "first, second",
  [("data:4,model:2", ONE), (ONE, "data:2,model:4")],
)
def test_a_run_goes_on_upon_another_mesh(tmp_path, alone, first, second):
  with pytest.raises(Killed):
    run_head(tmp_path, "eagle3", first, stop=3)
  assert [x["step"] for x in log(tmp_path)] == [1, 2, 3]
  assert_same(run_head(tmp_path, "eagle3", second), alone("eagle3"))
