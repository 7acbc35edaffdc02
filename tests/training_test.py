"""Training: steps that are right, runs that resume bit for bit."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec.models import transformer
from specdec.training import log, loop, objective, run, saving
from specdec.training.options import Options
from tiny_training import CONFIG, OPTIONS, assert_equal, packed, params


class TestStep:
  def test_accumulated_pieces_are_one_batch(self):
    model = transformer.model(CONFIG)
    batch = jnp.asarray(packed().batch(0, 4))
    results = []
    for pieces in (1, 2, 4):
      options = Options(
        steps=9, batch=4, sequence=6, warmup=2, accumulate=pieces
      )
      optimizer = loop.make_optimizer(options)
      step = loop.make_step(objective.language_model(model), optimizer, options)
      results.append(step(loop.init(params(), optimizer), None, batch))
    for state, measures in results[1:]:
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        (state.params, measures),
        (results[0][0].params, results[0][1]),
      )

  @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_learns(self, optimizer, dtype):
    options = Options(
      steps=60,
      batch=8,
      sequence=6,
      warmup=5,
      optimizer=optimizer,
      learning_rate=0.02,
      dtype=dtype,
    )
    update = loop.make_optimizer(options)
    step = loop.make_step(
      objective.language_model(transformer.model(CONFIG)), update, options
    )
    state = loop.init(params(), update)
    batches = packed()
    losses = []
    for i in range(options.steps):
      state, measures = step(state, None, jnp.asarray(batches.batch(i, 8)))
      losses.append(float(measures["loss"]))
    assert losses[0] > 2.5 and np.mean(losses[-5:]) < 1.2
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))

  def test_a_step_that_is_not_finite_changes_no_weight(self):
    optimizer = loop.make_optimizer(OPTIONS)

    def poisoned(weights, frozen, tokens):
      del frozen
      value = jnp.sum(weights["embed"]["weight"])
      return jnp.where(tokens[0, 0] == 3, jnp.nan, value), {}

    step = loop.make_step(poisoned, optimizer, OPTIONS)
    state = loop.init(params(), optimizer)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, _ = step(state, None, jnp.full((4, 7), 3))
    assert_equal(before, (state.params, state.opt_state))
    assert (int(state.step), int(state.failed)) == (1, 1)
    state, _ = step(state, None, jnp.zeros((4, 7), int))
    assert (int(state.step), int(state.failed)) == (2, 1)  # not forgotten
    state, _ = step(state, None, jnp.full((4, 7), 3))
    assert int(state.failed) == 1


class Killed(BaseException):
  """Stands for a kill: nothing catches it."""


def train(folder, kill_at=None, aim=None, exported=None):
  batches = packed()
  if kill_at is not None:
    serve = batches.batch

    def batch(step, size):
      if step == kill_at:
        raise Killed
      return serve(step, size)

    batches.batch = batch
  exported = {} if exported is None else exported
  return run.train(
    params(),
    None,
    aim or objective.language_model(transformer.model(CONFIG)),
    batches,
    packed(seed=1),
    OPTIONS,
    folder,
    export=lambda weights, name: exported.update(
      {name: jax.tree.map(np.array, weights)}
    ),
  )


def curves(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  exported = {}
  return train(folder, exported=exported), curves(folder), exported


class TestRun:
  # Before the first checkpoint, right after one, before an evaluation.
  @pytest.mark.parametrize("at", [[2], [6], [7], [3, 5, 11]])
  def test_resumes_bit_for_bit(self, tmp_path, whole, at):
    for step in at:
      with pytest.raises(Killed):
        train(tmp_path, kill_at=step)
    exported = {}
    weights = train(tmp_path, exported=exported)
    assert curves(tmp_path) == whole[1]
    assert_equal(weights, whole[0])
    assert_equal(exported["last"], whole[2]["last"])

  def test_exports_the_best(self, whole):
    held_out = [x["loss"] for x in whole[1] if x["kind"] == "held_out"]
    assert len(held_out) == 3 and held_out[-1] == min(held_out)
    assert_equal(whole[2]["best"], whole[0])

  def test_tensorboard_reads_it(self, tmp_path):
    train(tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"held_out/loss" in file.read_bytes()

  @pytest.mark.parametrize("damage", ["cut", "empty", "gone", "no folder"])
  def test_a_damaged_checkpoint_gives_way(
    self, tmp_path, whole, capsys, damage
  ):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=10)
    damaged = tmp_path / "checkpoints" / "9"
    if damage == "no folder":
      shutil.rmtree(damaged / "default", ignore_errors=True)
      for file in damaged.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    for file in damaged.rglob("*"):
      if not file.is_file():
        continue
      if damage == "gone":
        file.unlink()
      else:
        kept = file.stat().st_size // 2 if damage == "cut" else 0
        file.write_bytes(file.read_bytes()[:kept])
    weights = train(tmp_path)
    said = capsys.readouterr().err
    assert "checkpoint 9 is unusable" in said and "after step 6" in said
    assert_equal(weights, whole[0])
    assert curves(tmp_path) == whole[1]
    assert (tmp_path / "unusable" / "9-0").is_dir()

  def test_nothing_left_to_go_on_from(self, tmp_path):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=7)
    for file in (tmp_path / "checkpoints").rglob("*"):
      if file.is_file():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint under"):
      train(tmp_path)

  def test_a_value_changed_on_disk_is_noticed(self, tmp_path):
    # Too large for the reader's own checks, which are of its index.
    def state(step):
      noise = jax.random.normal(jax.random.key(step), (512, 512))
      params = {"w": noise}
      optimizer = loop.make_optimizer(OPTIONS)
      return loop.init(params, optimizer).replace(step=jnp.array(step))

    store = saving.Checkpoints(tmp_path)
    for step in (1, 2):
      store.save(state(step))
    store.close()
    folder = tmp_path / "checkpoints" / "2"
    files = [file for file in folder.rglob("*") if file.is_file()]
    large = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(large.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 512] = bytes(512)
    large.write_bytes(content)
    found, faults = saving.Checkpoints(tmp_path).restore(state(0))
    assert int(found.step) == 1 and len(faults) == 1
    assert_equal(found.params, state(1).params)

  def test_half_written_checkpoint_is_no_checkpoint(self, tmp_path, whole):
    with pytest.raises(Killed):
      train(tmp_path, kill_at=7)
    half = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "default").write_bytes(b"...")
    assert_equal(train(tmp_path), whole[0])

  def test_nan_stops_and_names_the_step(self, tmp_path):
    baseline = objective.language_model(transformer.model(CONFIG))
    bad = packed().batch(7, 4)

    def aim(weights, frozen, tokens):
      loss, measures = baseline(weights, frozen, tokens)
      hit = jnp.all(tokens == jnp.asarray(bad))
      return jnp.where(hit, jnp.nan, loss), measures

    with pytest.raises(run.NotFinite, match="not finite at step 8"):
      train(tmp_path, aim=aim)
    left = sorted(int(x.name) for x in (tmp_path / "checkpoints").iterdir())
    assert left == [3, 6]


class TestLog:
  def test_log_drops_what_will_come_again(self, tmp_path):
    first = log.Log(tmp_path, 0)
    for step in (1, 2, 3):
      first.write(step, "held_out", {"loss": 4.0 - step})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
      file.write('{"step": 4, "ki')
    again = log.Log(tmp_path, 2)
    again.close()
    assert again.lowest == 2.0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
  "change, complaint",
  [
    ({"steps": 0}, "steps = 0"),
    ({"accumulate": 3}, "does not divide"),
    ({"warmup": 12}, "warmup = 12"),
    ({"optimizer": "sgd"}, "known: adamw, muon"),
    ({"dtype": "float16"}, "known: float32, bfloat16"),
    ({"learning_rate": 0.0}, "learning_rate = 0.0"),
    ({"clip": -1.0}, "clip = -1.0"),
    ({"adam_b2": 2.0}, r"adam_b2 = 2.0; it must be in 0\.\.1"),
  ],
)
def test_options_refuse(change, complaint):
  with pytest.raises(ValueError, match=complaint):
    Options(**({"steps": 12, "batch": 4, "sequence": 6, "warmup": 2} | change))
