"""Heads whose matrices are integers: lossless, and priced as they are."""

import functools

import jax
import numpy as np
import pytest

from specdec.benchmark.batches import Batch
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.drafters.heads import draft_head
from specdec.models.quantization import Quantized
from specdec.models.weight_formats import WeightFormat


@functools.cache
def decoder_of(drafter, **options):
  setup = Setup(
    shipped.TARGET, drafter, k=3, batch=1, prompt_size=192, **options
  )
  target = setup.load_target(print)
  return setup.decoder(target)


def text_of(decoder):
  ids = decoder.tokenizer.encode(shipped.PROMPT.read_text())[:128]
  return decoder.complete(Batch([ids], [0]))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if name == "mtp" else [pytest.mark.slow])
    for name in shipped.drafters(shipped.TARGET)
  ],
)
def test_text_is_the_target_s(name):
  ours = text_of(decoder_of(f"head({name}, weights=int8)", max_new_tokens=24))
  plain = decoder_of("none", max_new_tokens=24)
  assert ours.texts == text_of(plain).texts
  assert ours.num_rounds < len(ours.texts[0])


@pytest.mark.parametrize(
  "name, weights",
  [("mtp", "int8"), ("prophet", "int4"), ("medusa", "'int8(group=64)'")],
)
def test_bytes_are_those_of_its_arrays(name, weights):
  whole = decoder_of(f"head({name})")
  small = decoder_of(f"head({name}, weights={weights})")
  held = sum(x.nbytes for x in jax.tree.leaves(small.params.draft))
  cost = small.drafter.cost
  np.testing.assert_allclose(cost.weight_bytes, held, rtol=0.05)
  ratio = cost.weight_bytes / whole.drafter.cost.weight_bytes
  assert ratio < (0.2 if weights == "int4" else 0.3)
  # KV and streams are of the target's type; the pass reads what it holds.
  assert cost.position_bytes == whole.drafter.cost.position_bytes
  assert cost.hidden_bytes == whole.drafter.cost.hidden_bytes
  np.testing.assert_allclose(
    cost.step.bytes / whole.drafter.cost.step.bytes, ratio, rtol=0.02
  )


def test_rows_of_the_target_s_head_are_integers_too():
  draft = decoder_of("head(mtp, weights=int8)").params.draft
  assert isinstance(draft["head"], Quantized)
  whole = decoder_of("head(mtp)").params.draft
  assert not any(
    isinstance(x, Quantized)
    for x in jax.tree.leaves(whole, is_leaf=lambda x: isinstance(x, Quantized))
  )


def test_of_the_weights_alone_none_is_left_in_floats():
  net = {
    "map": {"weight": np.ones((64, 32), np.float32)},
    "norm": {"scale": np.ones(32, np.float32)},
  }
  small = draft_head.quantize({"net": net}, WeightFormat("int8"))["net"]
  assert isinstance(small["map"]["weight"], Quantized)
  assert small["norm"]["scale"] is net["norm"]["scale"]


def test_other_types_are_refused():
  with pytest.raises(ValueError, match="there are int8 and int4"):
    decoder_of("head(mtp, weights=stored)")
