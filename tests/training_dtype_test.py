"""The type of a training step's products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import checkpoints
from specdec.models.config import TransformerConfig
from specdec.models.products import einsum_float32
from specdec.training import (
  data,
  loop,
  run,
  saving,
  train_drafter,
  train_joint,
  train_model,
)
from specdec.training.setup import from_config
from tiny_training import DECODING, SHAPE, STEPS, write_letters

MODEL = dict(vocab_size=32, num_layers=2, tied=True, **SHAPE)
HEAD = dict(kind="prophet", levels=2, num_layers=1, head="shared", **SHAPE)
LOSS = dict(divergence="cross_entropy", token_weight=1.0, decay=1.0)
SKIP = dict(dropout=0.5, exit_scale=0.2, rotation=2)
KINDS = {
  "language_model": {},
  "distillation": dict(loss="forward_kl", decoding=DECODING),
  "prophet": dict(head_config=HEAD, loss=LOSS, decoding=DECODING),
  "eagle3": dict(head_config=HEAD | dict(kind="eagle3", features=(0, 1, 2))),
  "block": dict(
    head_config=HEAD
    | dict(kind="block", features=(1,), block=dict(successor="gated_markov"))
  ),
  "layer_skip": dict(layer_skip=SKIP, decoding=DECODING | dict(exit_layer=1)),
}


def product_types(jaxpr):
  """Returns the types of all operands of matrix products."""
  types = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      types |= {x.aval.dtype.name for x in equation.invars}
    for inner in jax.tree.leaves(list(equation.params.values())):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        types |= product_types(inner)
  return types


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_products_are_in_the_options_dtype(
  kind, dtype, tmp_path, monkeypatch
):
  """Forward and backward, of what is trained and of what it learns from."""
  write_letters(tmp_path / "letters")
  (tmp_path / "text.txt").write_text("the cat sat on a mat " * 40)
  entries = dict(
    tokenizer=str(tmp_path / "letters"),
    data=str(tmp_path / "text.txt"),
    held_out=str(tmp_path / "text.txt"),
    model=MODEL,
    options=STEPS | dict(dtype=dtype),
  )
  if kind in ("distillation", "eagle3", "block"):
    config = TransformerConfig(**MODEL)
    weights = checkpoints.random_checkpoint(config, 0).params
    tokenizer = data.load_tokenizer(entries["tokenizer"], config.vocab_size)
    saving.export_model(tmp_path / "target", weights, config, tokenizer)
    entries["target"] = str(tmp_path / "target")
  if kind in ("eagle3", "block"):
    del entries["tokenizer"], entries["model"]
    entries |= dict(loss={}, decoding=DECODING)
  captured = []

  def capture(params, frozen, objective, batches, held_out, options, *_, **__):
    captured.append((params, frozen, objective, batches, options))

  monkeypatch.setattr(run, "train", capture)
  setup = from_config(entries | KINDS[kind])
  if kind in ("prophet", "layer_skip"):
    train_joint.train(setup, tmp_path / "run")
  elif kind in ("eagle3", "block"):
    train_drafter.train(setup, tmp_path / "run")
  else:
    train_model.load(setup).train(tmp_path / "run")
  ((params, frozen, objective, batches, options),) = captured
  optimizer = loop.make_optimizer(options)
  state = loop.init(params, optimizer)
  batch = jax.tree.map(jnp.asarray, batches.batch(0, options.batch))
  step = jax.make_jaxpr(loop.make_step(objective, optimizer, options))
  assert product_types(step(state, frozen, batch).jaxpr) == {dtype}


def test_derivatives_of_a_product_are_rounded_and_no_more():
  rng = np.random.default_rng(0)
  x, y, weight = rng.normal(size=(3, 5, 5)).astype(np.float32)

  def loss(x, y):
    return jnp.sum(weight * einsum_float32("ij,kj->ik", x, y))

  exact = [weight @ y, weight.T @ x]
  for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 0.05)):
    operands = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    assert einsum_float32("ij,kj->ik", *operands).dtype == jnp.float32
    for value, wanted in zip(jax.grad(loss, (0, 1))(*operands), exact):
      assert value.dtype == dtype
      np.testing.assert_allclose(value, wanted, atol=tolerance)
