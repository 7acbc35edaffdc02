"""Joint training: both losses by hand, and where their gradients go."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import drafters
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, joint, loop, objective, run
from specdec.training.drafting import Loss
from specdec.training.options import Options
from specdec.types import Params
from tiny_training import CONFIG, OPTIONS, assert_equal, packed

LAYERS = 3
SHAPE = dataclasses.replace(CONFIG, num_layers=LAYERS)
MODEL = transformer.model(SHAPE)
TINY = dict(width=8, mlp_width=12, num_heads=2, head_dim=4, head="shared")
STEPS = 12


def target(seed=0):
  return transformer.init_params(SHAPE, jax.random.key(seed))


def tokens():
  return jnp.asarray(packed().batch(0, 4))


def head_from_module(kind, **changes):
  layers = 0 if kind == "medusa" else 1
  head_config = HeadConfig(kind, num_layers=layers, **(TINY | changes))
  return drafters.LEARNED[kind](head_config, SHAPE, None, growing)


def numbered(step, rows=slice(None)):
  batch = data.Numbered(packed()).batch(step, 4)
  return {name: jnp.asarray(x[rows]) for name, x in batch.items()}


def skipping(**changes):
  settings = joint.LayerSkip(**(dict(rotation=LAYERS - 1) | changes))
  return joint.layer_skip(MODEL, LAYERS, settings, STEPS, seed=0)


def largest(tree):
  return max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree))


class TestDrafter:
  @pytest.mark.parametrize("kind", ["prophet", "mtp", "medusa"])
  def test_its_gradient_reaches_the_target_as_its_weight_says(self, kind):
    draft_head = head_from_module(kind, levels=1 if kind == "mtp" else 2)
    params = {"target": target(), "drafter": draft_head.init(jax.random.key(1))}
    batch = tokens()

    @jax.jit
    def gradients(params):
      def of(weight):
        aim = joint.with_drafter(
          MODEL, draft_head, Loss("cross_entropy", weight)
        )
        return jax.value_and_grad(lambda x: aim(x, None, batch), has_aux=True)

      return of(0.0)(params), of(0.5)(params)

    ((loss, _), none), ((both, measures), half) = gradients(params)
    baseline = jax.jit(
      jax.value_and_grad(
        lambda x: objective.language_model(MODEL)(x, None, batch)[0]
      )
    )
    alone, gradient = baseline(params["target"])
    # Weight 0: the language model's own training, and nothing else.
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      none["target"],
      gradient,
    )
    assert largest(none["drafter"]) == 0
    np.testing.assert_allclose(measures["cross_entropy"], loss, rtol=1e-6)
    wanted = loss + 0.5 * measures["auxiliary"]
    np.testing.assert_allclose(both, wanted, rtol=1e-6)
    # What is beside it moves the drafter, and every part of the target.
    overhead = jax.tree.map(jnp.subtract, half, none)
    for name, part in overhead["target"].items():
      assert largest(part) > 1e-5, name
    assert largest(overhead["drafter"]) > 1e-5

  def test_medusa_weighs_its_heads_as_the_paper_does(self):
    path = pathlib.Path(__file__).parents[1] / "configs" / "train" / "joint.py"
    spec = importlib.util.spec_from_file_location("joint_config", path)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    entry = config.KINDS["medusa"]
    levels = entry["head_config"].levels
    assert levels == 5
    draft_head = head_from_module("medusa", levels=levels)
    params = {"target": target(), "drafter": draft_head.init(jax.random.key(1))}
    batch = tokens()
    aim = jax.jit(joint.with_drafter(MODEL, draft_head, entry["loss"]))
    loss, measures = aim(params, None, batch)
    text, after = batch[:, :-1], batch[:, 1:]
    output, _ = MODEL.apply(params["target"], text, None)
    net = params["drafter"]
    target_weights = draft_heads.target_weights_of(
      Params(
        params["target"],
        draft_heads.weights_of(draft_head, net, params["target"]),
      )
    )
    read = draft_head.encode(net, output)
    size, total = text.shape[1], measures["cross_entropy"]
    for j in range(levels):
      # Head j reads what is j + 1 tokens before: nothing, at the beginning.
      stream = jnp.pad(read, ((0, 0), (j + 1, 0), (0, 0)))[:, :size]
      divergence = jax.nn.log_softmax(
        draft_head.logits(net, target_weights, stream, j)
      )
      there = jnp.take_along_axis(divergence, after[..., None], -1)[:, j:]
      total += 0.2 * 0.8**j * -jnp.mean(there)
    np.testing.assert_allclose(loss, total, rtol=1e-5)

  def test_refuses_a_goal_that_moves(self):
    with pytest.raises(ValueError, match="joint training needs"):
      joint.with_drafter(MODEL, head_from_module("mtp"), Loss("forward_kl"))


class TestLayerSkip:
  def test_weights_of_exits(self):
    on = jnp.array([1.0, 1, 1, 1])
    found = joint.exit_weights(4, 0.2, on)
    np.testing.assert_allclose(found, np.array([0, 0.2, 0.6, 3.6]) / 4.4, 1e-6)
    for on in ([1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]):
      found = joint.exit_weights(4, 0.2, jnp.array(on, float))
      assert float(jnp.sum(found)) == pytest.approx(1)
      assert not np.any(np.asarray(found)[np.array(on) == 0])

  def test_rates_of_dropout(self):
    found = [joint.drop_rates(4, 0.3, step, 11) for step in (0, 5, 10)]
    assert largest(found[0]) == 0
    time = np.exp(0.5 * np.log(2)) - 1
    assert float(found[1][0]) == 0
    np.testing.assert_allclose(found[1][-1], 0.3 * time, rtol=1e-5)
    depth = np.exp(np.arange(4) * np.log(2) / 3) - 1
    np.testing.assert_allclose(found[2], 0.3 * depth, atol=1e-6)

  def test_the_loss_is_that_of_the_exits_that_are_on(self):
    params = {"target": target()}
    aim = jax.jit(skipping(dropout=0.0))
    _, exits = jax.jit(joint.exit_losses(MODEL, LAYERS))(params, None, tokens())
    for step in (0, 1, 2):
      batch = numbered(step) | {"tokens": tokens()}
      loss, measures = aim(params, None, batch)
      on = jnp.zeros(LAYERS).at[step % 2].set(1).at[-1].set(1)
      weights = joint.exit_weights(LAYERS, 0.2, on)
      values = [exits["exit_1"], exits["exit_2"], exits["cross_entropy"]]
      wanted = sum(w * v for w, v in zip(weights, values))
      np.testing.assert_allclose(loss, wanted, rtol=1e-6)
      text = measures["cross_entropy"]
      np.testing.assert_allclose(text, exits["cross_entropy"], rtol=1e-6)

  def test_several_exits_at_once(self):
    params = {"target": target()}
    loss, _ = skipping(dropout=0.0, rotation=1)(params, None, numbered(0))
    _, exits = joint.exit_losses(MODEL, LAYERS)(
      params, None, numbered(0)["tokens"]
    )
    weights = joint.exit_weights(LAYERS, 0.2, jnp.ones(LAYERS))
    values = [exits["exit_1"], exits["exit_2"], exits["cross_entropy"]]
    wanted = sum(w * v for w, v in zip(weights, values))
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)

  def test_what_is_evaluated_leaves_nothing_out(self):
    params = {"target": target()}
    evaluated = joint.with_target_loss(joint.exit_losses(MODEL, LAYERS))
    loss, measures = evaluated(params, None, tokens())
    baseline, _ = objective.language_model(MODEL)(target(), None, tokens())
    np.testing.assert_allclose(loss, baseline, rtol=1e-6)
    assert loss == measures["cross_entropy"]
    alone, _ = joint.with_target_loss(joint.target_only(MODEL))(
      params, None, tokens()
    )
    np.testing.assert_allclose(alone, baseline, rtol=1e-6)

  def test_a_layer_left_out_learns_nothing(self):
    # At the last step p = 1: every row leaves the last layer out.
    params = {"target": target()}
    aim = skipping(dropout=1.0)
    gradient, measures = jax.jit(jax.grad(aim, has_aux=True))(
      params, None, numbered(STEPS - 1)
    )
    assert largest(gradient["target"]["layer_2"]) == 0
    assert largest(gradient["target"]["layer_0"]) > 1e-6
    assert jnp.isfinite(measures["cross_entropy"])

  def test_rows_leave_layers_out_by_themselves(self):
    kept = jnp.array([[True, True, True], [True, False, True]])
    text = tokens()[:2, :-1]

    @jax.jit
    def of_row(params, row):
      def value(params):
        streams = joint._residuals(MODEL, params, text, LAYERS, kept)
        return jnp.sum(streams[1][row] ** 2), streams

      return jax.grad(value, has_aux=True)(params)

    gradient, streams = of_row(target(), 1)
    np.testing.assert_array_equal(streams[0][1], streams[1][1])
    assert largest(gradient["layer_1"]) == 0
    gradient, streams = of_row(target(), 0)
    assert largest(gradient["layer_1"]) > 1e-6
    assert jnp.any(streams[0][0] != streams[1][0])

  def test_a_row_is_dropped_alike_in_any_piece_of_the_batch(self):
    params = {"target": target()}
    aim = jax.jit(skipping(dropout=1.0))
    whole, _ = aim(params, None, numbered(8))
    rows = [
      aim(params, None, numbered(8, slice(i, i + 1)))[0] for i in range(4)
    ]
    np.testing.assert_allclose(whole, np.mean(rows), rtol=1e-6)
    full, _ = skipping(dropout=0.0)(params, None, numbered(8))
    assert abs(float(full) - float(whole)) > 1e-6  # something was left out

  def test_how_often_rows_leave_a_layer_out(self):
    batch = {
      "step": jnp.full((4000,), 7, jnp.int32),
      "row": jnp.arange(4000, dtype=jnp.int32),
    }
    noise = joint._uniform(3, batch, 4)
    np.testing.assert_allclose(jnp.mean(noise < 0.3, axis=0), 0.3, atol=0.03)
    other = joint._uniform(3, batch | {"step": batch["step"] + 1}, 4)
    assert jnp.mean(noise == other) < 0.01

  @pytest.mark.parametrize(
    "change, complaint",
    [
      ({"dropout": 1.5}, "dropout = 1.5"),
      ({"exit_scale": -1.0}, "exit_scale = -1.0"),
      ({"rotation": 0}, "rotation = 0"),
    ],
  )
  def test_refuses(self, change, complaint):
    with pytest.raises(ValueError, match=complaint):
      joint.LayerSkip(**change)
    with pytest.raises(ValueError, match="1 layers"):
      joint.exit_losses(MODEL, 1)


class Killed(BaseException):
  """Stands for a kill: nothing catches it."""


def test_resumes_bit_for_bit_with_what_is_left_out(tmp_path):
  def train(folder, kill_at=None):
    batches = data.Numbered(packed())
    serve = batches.batch

    def batch(step, size):
      if step == kill_at:
        raise Killed
      return serve(step, size)

    batches.batch = batch
    return run.train(
      {"target": target()},
      None,
      skipping(dropout=1.0),
      batches,
      packed(seed=1),
      OPTIONS,
      folder,
      export=lambda weights, name: None,
      evaluated=joint.with_target_loss(joint.exit_losses(MODEL, LAYERS)),
    )

  whole = train(tmp_path / "whole")
  with pytest.raises(Killed):
    train(tmp_path / "killed", kill_at=7)
  assert_equal(train(tmp_path / "killed"), whole)
  curves = [
    (tmp_path / name / "metrics.jsonl").read_text()
    for name in ("whole", "killed")
  ]
  assert curves[0] == curves[1] and "exit_2" in curves[0]


def test_muon_leaves_the_tables_to_adam():
  options = Options(steps=9, batch=4, sequence=6, warmup=2, optimizer="muon")
  optimizer = loop.make_optimizer(options)
  flat = jax.eval_shape(optimizer.init, target())
  deep = jax.eval_shape(optimizer.init, {"target": target()})
  count = [len(jax.tree.leaves(x)) for x in (flat, deep)]
  assert count[0] == count[1]
