"""Losses by hand, distillation, and the two ways to evaluate a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import drafters
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import (
  evaluate,
  loop,
  losses,
  objective,
  samples,
  setup,
)
from specdec.training.options import Options
from specdec.types import Params
from tiny_training import CONFIG, packed, params


class TestLosses:
  P = np.array([0.5, 0.25, 0.25, 0.0])
  Q = np.array([0.25, 0.5, 0.125, 0.125])

  @pytest.mark.parametrize(
    "loss, value",
    [
      # Of Q against P: half of .25 + .25 + .125 + .125; sums of p log(p / q).
      (losses.total_variation, 0.375),
      (
        losses.forward_kl,
        0.5 * np.log(2) - 0.25 * np.log(2) + 0.25 * np.log(2),
      ),
    ],
  )
  def test_by_hand(self, loss, value):
    with np.errstate(divide="ignore"):
      found = loss(jnp.log(self.Q), jnp.log(self.P))
    np.testing.assert_allclose(found, value, rtol=1e-6)

  def test_reverse_kl_is_forward_kl_turned_around(self):
    p, q = jnp.log(self.Q[:3] / 0.875), jnp.log(self.P[:3])
    np.testing.assert_allclose(
      losses.reverse_kl(p, q), losses.forward_kl(q, p), rtol=1e-6
    )

  def test_reverse_kl_forbids_what_the_target_never_says(self):
    assert losses.reverse_kl(jnp.log(self.Q), jnp.log(self.P)) == jnp.inf

  def test_cross_entropy(self):
    distribution = jnp.log(jnp.array([self.P, self.Q]))
    found = losses.cross_entropy(distribution, jnp.array([1, 0]))
    np.testing.assert_allclose(found, [np.log(4), np.log(4)], rtol=1e-6)

  @pytest.mark.parametrize("name", sorted(losses.DISTANCES))
  def test_equal_distributions_are_at_no_distance(self, name):
    distribution = jax.nn.log_softmax(
      jax.random.normal(jax.random.key(0), (5, 7))
    )
    value, slope = jax.value_and_grad(
      lambda x: losses.DISTANCES[name](
        jax.nn.log_softmax(x), distribution
      ).sum()
    )(distribution)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    if name != "total_variation":  # |x| has a slope on either side of 0
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

  def test_the_target_itself_is_accepted_always(self):
    model = transformer.model(CONFIG)
    aim = objective.distillation(model, model, "forward_kl")
    loss, measures = aim(params(), params(), jnp.asarray(packed().batch(0, 4)))
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(measures["acceptance"], 1, atol=1e-6)
    assert measures["agreement"] == 1

  @pytest.mark.parametrize("loss", ["cross_entropy", *sorted(losses.DISTANCES)])
  def test_comes_nearer_to_the_target(self, loss):
    target = jax.tree.map(lambda x: 8 * x, params(1))  # sharp distributions
    options = Options(
      steps=150, batch=8, sequence=6, warmup=5, learning_rate=0.05
    )
    optimizer = loop.make_optimizer(options)
    aim = objective.distillation(
      transformer.model(self.DRAFT), transformer.model(CONFIG), loss
    )
    step = loop.make_step(aim, optimizer, options)
    draft = transformer.init_params(self.DRAFT, jax.random.key(2))
    state = loop.init(draft, optimizer)
    batches, measured = packed(), []
    for i in range(options.steps):
      state, measures = step(state, target, jnp.asarray(batches.batch(i, 8)))
      measured.append({name: float(x) for name, x in measures.items()})
    first, last = measured[0], measured[-1]
    assert last["loss"] < 0.8 * first["loss"]
    if loss != "cross_entropy":
      assert last["acceptance"] > first["acceptance"] + 0.1
      assert last["agreement"] > first["agreement"]

  def test_unknown_loss(self):
    model = transformer.model(CONFIG)
    with pytest.raises(ValueError, match="known: cross_entropy, forward_kl"):
      objective.distillation(model, model, "hinge")

  @pytest.mark.parametrize("temperature", [0.0, 1.0])
  def test_evaluated_by_decoding(self, temperature):
    model = transformer.model(CONFIG)
    decoding = setup.Decoding(
      k=3, prompts=4, length=5, new_tokens=12, temperature=temperature
    )
    measure = evaluate.acceptance_by_decoding(
      model, drafters.model(model, decoding.k), packed(), decoding
    )
    same = measure(Params(params(), params()))
    assert same["prefix_acceptance"] == [1.0, 1.0, 1.0]
    assert same["tokens_per_pass"] == 4
    negated = jax.tree.map(lambda x: -60 * x, params())
    other = measure(Params(params(), negated))
    assert other["tokens_per_pass"] < 4

  def test_samples_are_the_targets_own_and_resume(self, tmp_path):
    model = transformer.model(CONFIG)
    prompts = packed().batch(0, samples.BATCH * 2 + 3)[:, :3]
    texts = samples.sample(model, params(), prompts, 9, tmp_path, temperature=0)
    assert texts.shape == (2 * samples.BATCH, 9)
    np.testing.assert_array_equal(texts[:, :3], prompts[: len(texts)])
    logits = model.apply(params(), jnp.asarray(texts), None)[0].logits
    np.testing.assert_array_equal(
      np.argmax(logits[:, 2:-1], axis=-1), texts[:, 3:]
    )
    (tmp_path / "00000016.npy").unlink()
    marked = np.load(tmp_path / "00000000.npy") + 1
    np.save(tmp_path / "00000000.npy", marked)
    again = samples.sample(model, params(), prompts, 9, tmp_path, temperature=0)
    np.testing.assert_array_equal(again[: samples.BATCH], marked)  # kept
    np.testing.assert_array_equal(
      again[samples.BATCH :], texts[samples.BATCH :]
    )
