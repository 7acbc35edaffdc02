"""Training: steps that are right, runs that resume bit for bit."""

import dataclasses
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

import learned_kinds
import tiny_training
from learned_kinds import IDS, V
from specdec.models import transformer
from specdec.training import data, log, loop, objective, run, saving
from specdec.training.muon import orthogonalize
from specdec.types import Source
from tiny_training import (
  CONFIG,
  OPTIONS,
  Killed,
  assert_equal,
  packed,
  params,
)

HEADS = *learned_kinds.KINDS, *learned_kinds.PARALLEL, *learned_kinds.BLOCKS
LANGUAGE_MODEL = objective.language_model(transformer.model(CONFIG))


class TestStep:
  def test_accumulated_microbatches_equal_one_batch(self):
    batch = jnp.asarray(packed().batch(0, 4))
    results = []
    for pieces in (1, 2):
      options = dataclasses.replace(OPTIONS, accumulate=pieces)
      optimizer = loop.make_optimizer(options)
      step = loop.make_step(LANGUAGE_MODEL, optimizer, options)
      state, measures = step(loop.init(params(), optimizer), None, batch)
      results.append((state.params, measures))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results
    )

  def test_accumulated_pairs_of_unequal_lengths_equal_one_batch(self):
    """A microbatch of few tokens must not weigh as much as one of many."""
    config = dataclasses.replace(
      CONFIG,
      num_kv_heads=CONFIG.num_heads,
      encoder_layers=1,
      relative_buckets=4,
      relative_distance=8,
    )
    rng = np.random.default_rng(0)
    source, tokens = rng.integers(0, config.vocab_size, (2, 4, 9))
    lengths = np.array([8, 7, 1, 2], np.int32)
    batch = data.Pairs(Source(source, np.full(4, 9)), tokens, lengths)
    weights = transformer.init_params(config, jax.random.key(0))
    results = []
    for pieces in (1, 2, 4):
      options = dataclasses.replace(OPTIONS, accumulate=pieces)
      optimizer = loop.make_optimizer(options)
      model = objective.language_model(transformer.model(config))
      step = loop.make_step(model, optimizer, options)
      start = loop.init(jax.tree.map(jnp.copy, weights), optimizer)
      results.append(step(start, None, batch)[1])
    for result in results[1:]:
      for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(result[name], results[0][name], rtol=1e-5)

  def test_an_evaluation_in_parts_weighs_tokens(self):
    lengths = np.array([8, 6, 1], np.int32)
    tokens, source = np.zeros((3, 9), int), np.zeros((3, 2), int)
    sequences = data.Pairs(Source(source, lengths), tokens, lengths)
    mesh = jax.make_mesh((1,), ("data",))
    where = jax.NamedSharding(mesh, jax.P("data"))

    def measure(batch):
      values = jnp.arange(8.0)[None] * batch.length[:, None]
      return {"loss": objective.mean(values, batch)}

    whole, parts = (
      run._evaluate(measure, sequences, size, where)["loss"] for size in (3, 1)
    )
    assert parts == pytest.approx(whole) == pytest.approx((224 + 90) / 15)

  @pytest.mark.parametrize(
    "optimizer, dtype", [("adamw", "float32"), ("muon", "bfloat16")]
  )
  def test_the_loss_falls_and_weights_stay_float32(self, optimizer, dtype):
    options = dataclasses.replace(
      OPTIONS,
      steps=60,
      batch=8,
      optimizer=optimizer,
      learning_rate=0.02,
      dtype=dtype,
    )
    update = loop.make_optimizer(options)
    step = loop.make_step(LANGUAGE_MODEL, update, options)
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

  def test_an_update_that_is_not_finite_changes_no_weight(self):
    """AdamW divides by 1 - b2^t."""
    options = dataclasses.replace(OPTIONS, adam_b2=1.0)
    optimizer = loop.make_optimizer(options)
    step = loop.make_step(LANGUAGE_MODEL, optimizer, options)
    state = loop.init(params(), optimizer)
    before = jax.tree.map(np.array, state.params)
    state, _ = step(state, None, jnp.asarray(packed().batch(0, 4)))
    assert_equal(before, state.params)
    assert int(state.failed) == 1

  @pytest.mark.parametrize("kind", [*HEADS, "t5", "joint"])
  def test_muon_has_linear_maps_and_no_tables(self, kind):
    """Tables and projections are what has a dimension of a vocabulary."""
    sizes = {V, len(IDS)}
    if kind == "joint":
      sizes, weights = {CONFIG.vocab_size}, {"target": params()}
    elif kind == "t5":
      weights = learned_kinds.target(kind)[1]
    else:
      head = learned_kinds.draft_head(kind)
      weights = jax.eval_shape(head.init, jax.random.key(0))
    flat = traverse_util.flatten_dict(weights)
    wanted = {
      path
      for path, x in flat.items()
      if x.ndim == 2
      and sizes.isdisjoint(x.shape)
      and "relative_bias" not in path
    }
    options = dataclasses.replace(OPTIONS, optimizer="muon")
    state = jax.eval_shape(loop.make_optimizer(options).init, weights)
    moments = state[1].inner_states["muon"].inner_state[0][0].trace
    leaves = jax.tree_util.tree_leaves_with_path(moments)
    assert {tuple(part.key for part in path) for path, _ in leaves} == wanted
    assert wanted

  def test_muons_first_update_is_that_of_optax(self):
    rng = np.random.default_rng(0)
    shapes = dict(wide=(8, 24), tall=(24, 8), square=(8, 8), vector=(8,))
    weights, gradients = (
      {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
      }
      for _ in range(2)
    )
    options = dataclasses.replace(OPTIONS, optimizer="muon", weight_decay=0.1)
    ours = loop.make_optimizer(options)
    theirs = optax.chain(
      optax.clip_by_global_norm(options.clip),
      optax.contrib.muon(
        loop.schedule(options),
        weight_decay=0.1,
        adam_b2=options.adam_b2,
        consistent_rms=0.2,
      ),
    )
    updates = [
      optimizer.update(gradients, optimizer.init(weights), weights)[0]
      for optimizer in (ours, theirs)
    ]
    chex.assert_trees_all_close(*updates, rtol=2e-4, atol=1e-7)

  @pytest.mark.parametrize("shape", [(32, 96), (96, 32)])
  def test_singular_values_come_near_one(self, shape):
    x = jax.random.normal(jax.random.key(0), shape)
    values = jnp.linalg.svd(x, compute_uv=False)
    assert values.max() > 3 * values.min()
    for dtype in (jnp.float32, jnp.bfloat16):
      y = orthogonalize(x, dtype)
      assert y.dtype == dtype
      values = jnp.linalg.svd(y.astype(jnp.float32), compute_uv=False)
      assert 0.6 < values.min() <= values.max() < 1.3


def train(folder, kill_at=None, objective=LANGUAGE_MODEL):
  return tiny_training.train(folder, params(), objective, kill_at)


def train_until(folder, step):
  with pytest.raises(Killed):
    train(folder, kill_at=step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Weights, exports and log of a run without interruptions."""
  folder = tmp_path_factory.mktemp("whole")
  weights, exported = train(folder)
  (file,) = (folder / "tensorboard").iterdir()
  assert b"held_out/loss" in file.read_bytes()
  return weights, exported, tiny_training.log(folder)


def held_out_losses(whole):
  return [x["loss"] for x in whole[2] if x["kind"] == "held_out"]


class TestRun:
  # Before the first checkpoint, before an evaluation, right after a checkpoint.
  @pytest.mark.parametrize("steps", [[2, 7], [3, 6, 11]])
  def test_resumes_bit_for_bit(self, tmp_path, whole, steps):
    for step in steps:
      train_until(tmp_path, step)
    weights, exported = train(tmp_path)
    assert tiny_training.log(tmp_path) == whole[2]
    assert_equal(weights, whole[0])
    assert_equal(exported["last"], whole[1]["last"])

  def test_ctrl_c_saves_the_step_before(self, tmp_path, whole):
    options = dict(killed=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
      tiny_training.train(tmp_path, params(), LANGUAGE_MODEL, 7, **options)
    steps = {int(x.name) for x in (tmp_path / "checkpoints").iterdir()}
    assert max(steps) == 7 and 7 % tiny_training.OPTIONS.save_every
    weights, _ = train(tmp_path)
    assert_equal(weights, whole[0])

  def test_ctrl_c_in_the_last_evaluation_loses_none(
    self, tmp_path, whole, monkeypatch
  ):
    honest, calls = run._evaluate, []

    def stopped(*args):
      calls.append(args)
      if len(calls) == len(held_out_losses(whole)):
        raise KeyboardInterrupt
      return honest(*args)

    with monkeypatch.context() as patch:
      patch.setattr(run, "_evaluate", stopped)
      with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    weights, exported = train(tmp_path)
    assert_equal(weights, whole[0])
    assert_equal(exported["best"], whole[1]["best"])
    assert tiny_training.log(tmp_path) == whole[2]

  def test_exports_the_best(self, whole):
    held_out = held_out_losses(whole)
    assert len(held_out) == 3 and held_out[-1] == min(held_out)
    assert_equal(whole[1]["best"], whole[0])

  @pytest.mark.parametrize(
    "damage",
    [
      "cut",
      pytest.param("empty", marks=pytest.mark.slow),
      pytest.param("gone", marks=pytest.mark.slow),
      "no folder",
    ],
  )
  def test_a_damaged_checkpoint_gives_way(
    self, tmp_path, whole, capsys, damage
  ):
    train_until(tmp_path, 10)
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
    weights, _ = train(tmp_path)
    printed = capsys.readouterr().err
    assert "checkpoint 9 is unusable" in printed and "after step 6" in printed
    assert_equal(weights, whole[0])
    assert tiny_training.log(tmp_path) == whole[2]
    assert (tmp_path / "unusable" / "9-0").is_dir()

  def test_without_a_readable_checkpoint_it_refuses(self, tmp_path):
    train_until(tmp_path, 4)
    for file in (tmp_path / "checkpoints").rglob("*"):
      if file.is_file():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint under"):
      train(tmp_path)

  def test_a_value_changed_on_disk_is_noticed(self, tmp_path):
    # Too large for the reader's own checks, which are of its index.
    def state(step):
      noise = jax.random.normal(jax.random.key(step), (512, 512))
      optimizer = loop.make_optimizer(OPTIONS)
      return loop.init({"w": noise}, optimizer).replace(step=jnp.array(step))

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
    restored, faults = saving.Checkpoints(tmp_path).restore(state(0))
    assert int(restored.step) == 1 and len(faults) == 1
    assert_equal(restored.params, state(1).params)

  def test_half_written_checkpoint_is_no_checkpoint(self, tmp_path, whole):
    train_until(tmp_path, 7)
    half = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "default").write_bytes(b"...")
    assert_equal(train(tmp_path)[0], whole[0])

  def test_nan_stops_and_names_the_step(self, tmp_path):
    bad = packed().batch(7, 4)

    def objective(weights, frozen, tokens):
      loss, measures = LANGUAGE_MODEL(weights, frozen, tokens)
      hit = jnp.all(tokens == jnp.asarray(bad))
      return jnp.where(hit, jnp.nan, loss), measures

    with pytest.raises(run.NotFinite, match="not finite at step 8"):
      train(tmp_path, objective=objective)
    left = sorted(int(x.name) for x in (tmp_path / "checkpoints").iterdir())
    assert left == [3, 6]


def test_log_drops_entries_after_the_step_it_resumes_from(tmp_path):
  first = log.Log(tmp_path, 0)
  for step in (1, 2, 3):
    first.write(step, "held_out", {"loss": 4.0 - step})
  first.close()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "ki')
  again = log.Log(tmp_path, 2)
  again.close()
  assert again.lowest == 2.0
  assert len(tiny_training.log(tmp_path)) == 2


def test_the_best_block_drafter_has_the_longest_accepted_length(tmp_path):
  first = log.Log(tmp_path, 0)
  for step, (loss, length) in enumerate([(2.0, 1.0), (3.0, 1.5), (1.0, 1.2)]):
    values = {"loss": loss, "accepted_length": length}
    assert (log.score(values) < first.lowest) == (step < 2)
    first.write(step, "held_out", values)
  first.close()
  assert first.lowest == log.Log(tmp_path, 3).lowest == -1.5
