"""Joint training: both losses by hand, and where their gradients go."""

import dataclasses
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_training
from specdec import drafters
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, joint, objective
from specdec.training.drafting import Loss
from specdec.types import Params
from tiny_training import CONFIG, assert_equal, packed

LAYERS = 3
SHAPE = dataclasses.replace(CONFIG, num_layers=LAYERS)
MODEL = transformer.model(SHAPE)
EXIT_LOSSES = jax.jit(joint.exit_losses(MODEL))
TINY = dict(width=8, mlp_width=12, num_heads=2, head_dim=4, head="shared")
STEPS = 12


def target(seed=0):
  return transformer.init_params(SHAPE, jax.random.key(seed))


def tokens():
  return jnp.asarray(packed().batch(0, 4))


def draft_head(kind, **changes):
  layers = 0 if kind == "medusa" else 1
  head_config = HeadConfig(kind, num_layers=layers, **(TINY | changes))
  return drafters.LEARNED[kind](head_config, SHAPE, None, growing)


def numbered(step, rows=slice(None)):
  batch = data.Numbered(packed()).batch(step, 4)
  return {name: jnp.asarray(x[rows]) for name, x in batch.items()}


def skipping(**changes):
  settings = joint.LayerSkip(**(dict(rotation=LAYERS - 1) | changes))
  return jax.jit(joint.layer_skip(MODEL, settings, STEPS, seed=0))


def largest(tree):
  return max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def baseline():
  """Loss and gradient of the target as a language model."""
  (loss, _), gradient = jax.jit(
    jax.value_and_grad(objective.language_model(MODEL), has_aux=True)
  )(target(), None, tokens())
  return loss, gradient


class TestDrafter:
  @pytest.mark.parametrize(
    "kind, levels", [("prophet", 1), ("mtp", 1), ("medusa", 2)]
  )
  def test_its_gradient_reaches_the_target_by_its_weight(
    self, baseline, kind, levels
  ):
    head = draft_head(kind, levels=levels)
    params = {"target": target(), "drafter": head.init(jax.random.key(1))}
    both = joint.with_drafter(MODEL, head, Loss("cross_entropy", 0.5))
    (loss, measures), gradient = jax.jit(
      jax.value_and_grad(both, has_aux=True)
    )(params, None, tokens())
    np.testing.assert_allclose(
      measures["cross_entropy"], baseline[0], rtol=1e-6
    )
    weighted = baseline[0] + 0.5 * measures["auxiliary"]
    np.testing.assert_allclose(loss, weighted, rtol=1e-6)
    # The auxiliary loss moves the drafter, and every part of the target.
    overhead = jax.tree.map(jnp.subtract, gradient["target"], baseline[1])
    for name, part in overhead.items():
      assert largest(part) > 1e-5, name
    assert largest(gradient["drafter"]) > 1e-5

  def test_with_weight_0_the_target_trains_as_a_language_model(self, baseline):
    head = draft_head("medusa", levels=1)
    params = {"target": target(), "drafter": head.init(jax.random.key(1))}
    weightless = joint.with_drafter(MODEL, head, Loss("cross_entropy", 0.0))
    gradient, _ = jax.jit(jax.grad(weightless, has_aux=True))(
      params, None, tokens()
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      gradient["target"],
      baseline[1],
    )
    assert largest(gradient["drafter"]) == 0

  def test_medusa_weights_its_heads_as_the_paper_does(self):
    path = pathlib.Path(__file__).parents[1] / "configs" / "train" / "joint.py"
    spec = importlib.util.spec_from_file_location("joint_config", path)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    entry = config.KINDS["medusa"]
    levels = entry["head_config"].levels
    assert levels == 5
    head = draft_head("medusa", levels=levels)
    params = {"target": target(), "drafter": head.init(jax.random.key(1))}

    @jax.jit
    def by_hand(params, batch):
      net, text, after = params["drafter"], batch[:, :-1], batch[:, 1:]
      output, _ = MODEL.apply(params["target"], text, None)
      weights = draft_heads.weights_of(head, net, params["target"])
      target_weights = draft_heads.target_weights_of(
        Params(params["target"], weights)
      )
      hidden = head.encode(net, output)
      total = 0.0
      for j in range(levels):
        # Head j reads what is j + 1 tokens before: nothing, at the beginning.
        shifted = jnp.pad(hidden, ((0, 0), (j + 1, 0), (0, 0)))
        log_probs = jax.nn.log_softmax(
          head.logits(net, target_weights, shifted[:, : text.shape[1]], j)
        )
        of_text = jnp.take_along_axis(log_probs, after[..., None], -1)[:, j:]
        total += 0.2 * 0.8**j * -jnp.mean(of_text)
      return total

    both = jax.jit(joint.with_drafter(MODEL, head, entry["loss"]))
    loss, measures = both(params, None, tokens())
    expected = measures["cross_entropy"] + by_hand(params, tokens())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)

  def test_refuses_a_divergence_from_a_target_that_moves(self):
    with pytest.raises(ValueError, match="joint training needs"):
      joint.with_drafter(MODEL, draft_head("mtp"), Loss("forward_kl"))


class TestLayerSkip:
  def test_weights_of_exits(self):
    every = joint.exit_weights(4, 0.2, jnp.ones(4))
    np.testing.assert_allclose(every, np.array([0, 0.2, 0.6, 3.6]) / 4.4, 1e-6)
    for active in ([1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]):
      weights = joint.exit_weights(4, 0.2, jnp.array(active, float))
      assert float(jnp.sum(weights)) == pytest.approx(1)
      assert not np.any(np.asarray(weights)[np.array(active) == 0])

  def test_rates_of_dropout(self):
    first, middle, last = (
      joint.drop_rates(4, 0.3, step, 11) for step in (0, 5, 10)
    )
    assert largest(first) == 0 == float(middle[0])
    time = np.exp(0.5 * np.log(2)) - 1
    np.testing.assert_allclose(middle[-1], 0.3 * time, rtol=1e-5)
    depth = np.exp(np.arange(4) * np.log(2) / 3) - 1
    np.testing.assert_allclose(last, 0.3 * depth, atol=1e-6)

  @pytest.mark.parametrize("rotation", [1, 2])  # every exit, or one at a step
  def test_the_loss_is_that_of_the_active_exits(self, rotation):
    params = {"target": target()}
    skip = skipping(dropout=0.0, rotation=rotation)
    _, exits = EXIT_LOSSES(params, None, tokens())
    values = [exits["exit_1"], exits["exit_2"], exits["cross_entropy"]]
    for step in range(3):
      batch = numbered(step) | {"tokens": tokens()}
      loss, measures = skip(params, None, batch)
      active = jnp.zeros(LAYERS).at[step % rotation :: rotation].set(1)
      weights = joint.exit_weights(LAYERS, 0.2, active.at[-1].set(1))
      expected = sum(w * v for w, v in zip(weights, values))
      np.testing.assert_allclose(loss, expected, rtol=1e-6)
      np.testing.assert_allclose(
        measures["cross_entropy"], exits["cross_entropy"], rtol=1e-6
      )

  def test_evaluation_is_the_target_s_loss_with_all_layers(self, baseline):
    params = {"target": target()}
    for evaluated in (EXIT_LOSSES, joint.target_only(MODEL)):
      loss, measures = jax.jit(joint.with_target_loss(evaluated))(
        params, None, tokens()
      )
      np.testing.assert_allclose(loss, baseline[0], rtol=1e-6)
      assert loss == measures["cross_entropy"]

  def test_a_layer_left_out_learns_nothing(self):
    # At the last step p = 1: every row leaves the last layer out.
    gradient, measures = jax.jit(jax.grad(skipping(dropout=1.0), has_aux=True))(
      {"target": target()}, None, numbered(STEPS - 1)
    )
    assert largest(gradient["target"]["layer_2"]) == 0
    assert largest(gradient["target"]["layer_0"]) > 1e-6
    assert jnp.isfinite(measures["cross_entropy"])

  def test_rows_leave_layers_out_independently(self):
    kept = jnp.array([[True, True, True], [True, False, True]])
    text = tokens()[:2, :-1]

    @jax.jit
    def of_row(params, row):
      def value(params):
        residuals = joint._residuals(MODEL, params, text, kept)
        return jnp.sum(residuals[1][row] ** 2), residuals

      return jax.grad(value, has_aux=True)(params)

    gradient, residuals = of_row(target(), 1)
    np.testing.assert_array_equal(residuals[0][1], residuals[1][1])
    assert largest(gradient["layer_1"]) == 0
    gradient, residuals = of_row(target(), 0)
    assert largest(gradient["layer_1"]) > 1e-6
    assert jnp.any(residuals[0][0] != residuals[1][0])

  def test_a_row_is_dropped_alike_in_any_microbatch(self):
    params = {"target": target()}
    skip = skipping(dropout=1.0)
    whole, _ = skip(params, None, numbered(8))
    halves = [
      skip(params, None, numbered(8, slice(i, i + 2)))[0] for i in (0, 2)
    ]
    np.testing.assert_allclose(whole, np.mean(halves), rtol=1e-6)
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

  def test_refuses_a_target_of_one_layer(self):
    with pytest.raises(ValueError, match="1 layers"):
      joint.exit_losses(transformer.model(CONFIG))


@pytest.mark.slow
def test_dropout_resumes_bit_for_bit(tmp_path):
  skip = skipping(dropout=1.0)
  evaluated = joint.with_target_loss(EXIT_LOSSES)

  def train(name, kill_at=None):
    return tiny_training.train(
      tmp_path / name,
      {"target": target()},
      skip,
      kill_at,
      data.Numbered(packed()),
      evaluated=evaluated,
    )[0]

  whole = train("whole")
  with pytest.raises(tiny_training.Killed):
    train("killed", kill_at=7)
  assert_equal(train("killed"), whole)
  logs = [tiny_training.log(tmp_path / name) for name in ("whole", "killed")]
  assert logs[0] == logs[1] and "exit_2" in logs[0][-1]
