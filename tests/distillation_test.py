"""Losses by hand, distillation, and the two ways to evaluate a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import drafters
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import evaluate, loop, objective, samples, setup
from specdec.training.options import Options
from specdec.types import Params
from tiny_training import CONFIG, packed, params


class TestLosses:
  P = np.array([0.5, 0.25, 0.25, 0.0])
  Q = np.array([0.25, 0.5, 0.125, 0.125])

  def test_by_hand(self):
    p, q = jnp.log(self.P), jnp.log(self.Q)
    # Half of .25 + .25 + .125 + .125; the sum of p log(p / q).
    distance = objective.total_variation(q, p)
    np.testing.assert_allclose(distance, 0.375, rtol=1e-6)
    divergence = objective.forward_kl(q, p)
    np.testing.assert_allclose(divergence, 0.5 * np.log(2), rtol=1e-6)
    # What the target never emits is forbidden.
    assert objective.reverse_kl(q, p) == jnp.inf
    # The sum of p log(p / q) with p and q exchanged.
    divergence = objective.reverse_kl(p[:3], q[:3])
    expected = np.sum(self.P[:3] * np.log(self.P[:3] / self.Q[:3]))
    np.testing.assert_allclose(divergence, expected, rtol=1e-6)
    loss = objective.cross_entropy(jnp.stack([p, q]), jnp.array([1, 0]))
    np.testing.assert_allclose(loss, [np.log(4), np.log(4)], rtol=1e-6)

  @pytest.mark.parametrize("name", sorted(objective.DIVERGENCES))
  def test_equal_distributions_have_no_divergence(self, name):
    logits = jax.random.normal(jax.random.key(0), (5, 7))

    @jax.jit
    def divergence(x):
      return objective.DIVERGENCES[name](
        jax.nn.log_softmax(x), jax.nn.log_softmax(logits)
      ).sum()

    value, slope = jax.value_and_grad(divergence)(logits)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    # |x| has a slope on either side of 0
    if name not in ("total_variation", "lk_hybrid"):
      np.testing.assert_allclose(slope, 0, atol=1e-6)


class TestDistillation:
  DRAFT = TransformerConfig(
    vocab_size=17,
    num_layers=1,
    width=4,
    mlp_width=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
  )

  def test_the_target_itself_is_always_accepted(self):
    model = transformer.model(CONFIG)
    distillation = jax.jit(objective.distillation(model, model, "forward_kl"))
    batch = jnp.asarray(packed().batch(0, 4))
    loss, measures = distillation(params(), params(), batch)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(measures["acceptance"], 1, atol=1e-6)
    assert measures["agreement"] == 1

  @pytest.mark.parametrize("loss", ["cross_entropy", "total_variation"])
  def test_a_draft_comes_nearer_to_its_target(self, loss):
    target = jax.tree.map(lambda x: 8 * x, params(1))  # sharp distributions
    options = Options(
      steps=100, batch=8, sequence=6, warmup=5, learning_rate=0.05
    )
    optimizer = loop.make_optimizer(options)
    step = loop.make_step(
      objective.distillation(
        transformer.model(self.DRAFT), transformer.model(CONFIG), loss
      ),
      optimizer,
      options,
    )
    draft = transformer.init_params(self.DRAFT, jax.random.key(2))
    state = loop.init(draft, optimizer)
    batches, measured = packed(), []
    for i in range(options.steps):
      state, measures = step(state, target, jnp.asarray(batches.batch(i, 8)))
      measured.append(measures)
    first, last = measured[0], measured[-1]
    assert last["loss"] < 0.8 * first["loss"]
    if loss != "cross_entropy":
      assert last["acceptance"] > first["acceptance"] + 0.1
      assert last["agreement"] > first["agreement"]

  def test_unknown_loss(self):
    model = transformer.model(CONFIG)
    with pytest.raises(ValueError, match="known: cross_entropy, forward_kl"):
      objective.distillation(model, model, "hinge")

  def test_evaluated_by_decoding(self):
    model = transformer.model(CONFIG)
    decoding = setup.Decoding(
      k=3, prompts=4, length=5, new_tokens=12, temperature=1.0
    )
    measure = evaluate.acceptance_by_decoding(
      model, drafters.model(model, decoding.k), packed(), decoding
    )
    same = measure(Params(params(), params()))
    assert same["prefix_acceptance"] == [1.0, 1.0, 1.0]
    assert same["tokens_per_pass"] == 4
    negated = jax.tree.map(lambda x: -60 * x, params())
    assert measure(Params(params(), negated))["tokens_per_pass"] < 4

  def test_samples_are_the_target_s_text_and_resume(self, tmp_path):
    model, texts = transformer.model(CONFIG), packed()
    settings = setup.Samples(
      count=2 * samples.BATCH + 3, prompt=3, temperature=0
    )
    options = Options(steps=9, batch=4, sequence=8, warmup=2)
    prompts = texts.evenly_spaced(settings.count)[:, :3]

    def sample():
      return samples.of_target(
        settings, texts, model, params(), options, tmp_path
      ).rows

    rows = sample()
    assert rows.shape == (2 * samples.BATCH, 9)
    np.testing.assert_array_equal(rows[:, :3], prompts[: len(rows)])
    logits = jax.jit(model.apply)(params(), jnp.asarray(rows), None)[0].logits
    np.testing.assert_array_equal(
      np.argmax(logits[:, 2:-1], axis=-1), rows[:, 3:]
    )
    (tmp_path / "samples" / "00000016.npy").unlink()
    marked = np.load(tmp_path / "samples" / "00000000.npy") + 1
    np.save(tmp_path / "samples" / "00000000.npy", marked)
    np.testing.assert_array_equal(
      sample(), np.concatenate([marked, rows[samples.BATCH :]])
    )
