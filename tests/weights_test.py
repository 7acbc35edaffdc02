"""Weights held as integers: what they stand for, on disk and on devices."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from gguf import GGMLQuantizationType as Kind

from gguf_files import CONFIG, random_params, write
from specdec import checkpoints, decode, sampling
from specdec.benchmark import abstract
from specdec.benchmark.setup import Setup
from specdec.checkpoints import compressed
from specdec.compiled import memory_plan
from specdec.models import cpu_kernels, layouts, transformer, weight_formats
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig
from specdec.models.quantization import Quantized, dequantize
from specdec.models.weight_formats import WeightFormat
from specdec.roofline.cost import pass_bound
from specdec.types import Params

STORED = WeightFormat("stored")
TOKENS = jnp.array([[1, 5, 9, 2, 30, 7]])
SMALL = dict(target="stdlib-1m", drafter="lookup", k=3, max_new_tokens=32)


def logits(checkpoint):
  config = checkpoint.config
  model = transformer.model(config)
  cache = model.init_cache(1, 16)
  output, _ = jax.jit(model.apply)(checkpoint.params, TOKENS, cache)
  return output.logits


def greedy(checkpoint):
  return decode.autoregress(
    transformer.model(checkpoint.config),
    Params(checkpoint.params),
    TOKENS,
    jnp.array([TOKENS.size]),
    jax.random.key(0),
    max_length=24,
    sampling=sampling.settings(1),
  ).tokens


def is_quantized(x):
  return isinstance(x, Quantized)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernel", "xla"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_gguf_s_own_bytes_give_the_dequantised_logits(
  tmp_path, monkeypatch, kind, kernels
):
  monkeypatch.setattr(
    cpu_kernels, "available", lambda: kernels and cpu_kernels_there
  )
  params = {
    name: x / 8 if x.ndim == 2 else x for name, x in random_params().items()
  }
  path = write(tmp_path / "m.gguf", params, kind=kind)
  whole = checkpoints.load(path)
  kept = checkpoints.load(path, weights=STORED)
  assert kept.config == checkpoints.inspect(path, weights=STORED)
  flat = traverse_util.flatten_dict(kept.params, sep="/")
  matrices = {n: x for n, x in flat.items() if n.endswith("/weight")}
  assert all(is_quantized(x) for x in matrices.values())
  expected = traverse_util.flatten_dict(whole.params, sep="/")
  for name, x in matrices.items():  # the heads' rows in their order, too
    np.testing.assert_allclose(
      dequantize(x), expected[name], rtol=1e-6, atol=1e-7
    )
  expected = logits(whole)
  assert abs(expected).max() > 1
  kept = kept.packed()
  np.testing.assert_allclose(logits(kept), expected, atol=1e-4)
  np.testing.assert_array_equal(greedy(kept), greedy(whole))


cpu_kernels_there = cpu_kernels.available()


@pytest.mark.parametrize(
  "weights", ["int8(group=32)", "int4(group=32)", "int8"]
)
def test_compressed_tensors_round_trip(tmp_path, weights):
  path = write(tmp_path / "m.gguf")
  form = weight_formats.parse(weights)
  model = checkpoints.load(path, weights=form)
  folder = tmp_path / "saved"
  checkpoints.save_safetensors(folder, model.params, model.config)
  modes = {path.stat().st_mode for path in folder.iterdir()}
  assert len(modes) == 1  # whoever reads one of them reads all
  again = checkpoints.load(folder, weights=STORED)
  chex.assert_trees_all_equal(again.params, model.params)
  chex.assert_trees_all_equal_dtypes(again.params, model.params)
  assert dict(again.config.weights)["layer_0/mlp/down/weight"] == form
  whole = checkpoints.load(folder).params  # dequantised
  expected = jax.tree.map(
    lambda x: dequantize(x) if is_quantized(x) else x,
    model.params,
    is_leaf=is_quantized,
  )
  chex.assert_trees_all_close(whole, expected, rtol=1e-6)


def test_a_matrix_of_one_group_is_stored_again(tmp_path):
  config = TransformerConfig(
    vocab_size=32,
    num_layers=1,
    width=32,
    mlp_width=64,  # two groups of inputs
    num_heads=1,
    num_kv_heads=1,
    head_dim=32,
    weights=weight_formats.parse("int4(group=32)"),
  )
  model = checkpoints.random_checkpoint(config)
  for folder in (tmp_path / "once", tmp_path / "twice"):
    checkpoints.save_safetensors(folder, model.params, model.config)
    model = checkpoints.load(folder, weights=STORED)
  assert {*dict(model.config.weights).values()} == {config.weights}


def test_packed_int4_is_laid_out_as_compressed_tensors_does():
  values = jnp.array([[-8, -7, 0, 1, 2, 3, 4, 7]], jnp.int8).astype(jnp.int4)
  tensors = compressed.arrays("x.weight", Quantized(values, jnp.ones((1, 1))))
  [[word]] = tensors["x.weight_packed"].view(np.uint32).tolist()
  assert hex(word) == "0xfcba9810"  # the first weight in the lowest bits
  assert tensors["x.weight_shape"].tolist() == [1, 8]
  np.testing.assert_array_equal(
    compressed.unpack(tensors["x.weight_packed"]), values
  )


@pytest.mark.parametrize(
  "change, sentence",
  [
    ({"quant_method": "gptq"}, "quantised by 'gptq'; accepted: compressed"),
    ({"format": "marlin-24"}, "in 'marlin-24'; accepted: int-quantized, p"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "has kv_cache_scheme"),
    ({"transform_config": {"config_groups": {"a": 1}}}, "transform_config; ac"),
    ({"sparsity_config": {"format": "sparse-24"}}, "sparsity 'sparse-24'; acc"),
    (
      {"config_groups": {"a": {"input_activations": {"num_bits": 8}}}},
      "quantises input_activations; accepted: weights alone",
    ),
    (
      {
        "config_groups": {"a": {"weights": {"num_bits": 8, "symmetric": False}}}
      },
      "symmetric = False",
    ),
    (
      {
        "config_groups": {
          "a": {
            "weights": {"num_bits": 8, "strategy": "group", "group_size": 8}
          }
        }
      },
      "has a scale for every .* inputs, and config.json says 8",
    ),
  ],
)
def test_other_quantisation_is_refused_by_name(tmp_path, change, sentence):
  model = checkpoints.load(
    write(tmp_path / "m.gguf"), weights=WeightFormat("int8")
  )
  checkpoints.save_safetensors(tmp_path / "d", model.params, model.config)
  file = tmp_path / "d" / "config.json"
  config = json.loads(file.read_text())
  config["quantization_config"] |= change
  file.write_text(json.dumps(config))
  with pytest.raises(ValueError, match=sentence):
    checkpoints.load(tmp_path / "d")


@pytest.mark.parametrize(
  "weights, temperature",
  [("int8", 0.0), ("int4(group=32)", 1.0), ("bfloat16", 1.0)],
)
def test_the_speculative_text_is_that_of_the_target_as_it_is_held(
  weights, temperature
):
  setup = Setup(weights=weights, temperature=temperature, **SMALL)
  decoder = setup.load()
  [batch] = decoder.encode(["def total(numbers):\n"])
  speculative = decoder.decode(batch)
  assert speculative.texts == decoder.baseline().decode(batch).texts
  [caveat] = setup.caveats
  kind = weights.partition("(")[0]
  assert f"relative to the target in {kind}" in caveat


@pytest.mark.slow
@pytest.mark.parametrize(
  "target, drafter",
  [
    ("stdlib-11m", "head(eagle)"),  # it reads the projection as it is held
    ("stdlib-1m", "early_exit(1)"),
    ("stdlib-1m", "layer_skip(attention=[1])"),
  ],
)
def test_drafters_from_the_target_s_own_weights_read_integers(target, drafter):
  k = 3 if "head" in drafter else SMALL["k"]
  settings = SMALL | {"target": target, "drafter": drafter, "k": k}
  whole, held = Setup(**settings), Setup(weights="int8", **settings)
  rounds = []
  for setup in (whole, held):
    decoder = setup.load()
    [batch] = decoder.encode(["def total(numbers):\n"])
    ours, plain = decoder.decode(batch), decoder.baseline().decode(batch)
    assert ours.texts == plain.texts
    rounds.append(ours.num_rounds)
  assert abs(rounds[0] - rounds[1]) <= 3  # what it drafts is as good


@pytest.mark.parametrize(
  "weights, bits", [(None, 32), ("bfloat16", 16), ("int8", 8), ("int4", 4)]
)
def test_the_plan_and_the_roofline_know_what_is_held(weights, bits):
  setup = Setup(weights=weights, **SMALL)
  target = setup.load_target(packed=False)
  held = sum(
    x.size * {"int4": 4}.get(x.dtype.name, 8 * x.dtype.itemsize) / 8
    for x in jax.tree.leaves(target.checkpoint.params)
  )
  config = target.checkpoint.config
  assert memory_plan.weight_bytes(config) == held
  parameters = config.num_parameters
  extra = {"int4": 4 / 32}.get(weights, 0)
  assert held / parameters == pytest.approx(bits / 8 + extra, rel=0.08)
  read = pass_bound(config, 1, 1, 0).bytes
  assert read == pytest.approx(held, rel=0.05)
  shapes = abstract.target(setup).checkpoint.params
  chex.assert_trees_all_equal_shapes_and_dtypes(
    shapes, target.checkpoint.params
  )


def test_a_draft_model_in_int8_costs_and_holds_int8():
  setup = Setup(drafter="model(stdlib-1m, weights=int8)", max_new_tokens=32)
  decoder = setup.load()
  held = sum(x.nbytes for x in jax.tree.leaves(decoder.params.draft))
  assert decoder.drafter_cost.weight_bytes == pytest.approx(held, rel=0.05)
  assert setup.caveats == []
  whole = dataclasses.replace(setup, drafter="model(stdlib-1m)")
  prompts = decoder.encode(["import os\n"])
  ours, other = (x.decode(prompts[0]) for x in (decoder, whole.load()))
  assert ours.texts == other.texts
  assert abs(ours.num_rounds - other.num_rounds) <= 1  # it drafts as well


@pytest.mark.parametrize(
  "settings, sentence",
  [
    ({"weights": "int7"}, "weights = int7; did you mean int8 or int4"),
    ({"weights": "int8(group=0)"}, "group=0; it must be an integer >= 1"),
    ({"weights": "int8(group=100)"}, "groups of 100 do not divide"),
    ({"weights": "stored"}, "no matrix that can be kept as it is stored"),
    ({"weights": "int8", "drafter": "quantized"}, "are integers already"),
    (
      {
        "weights": "int8",
        "target": "preset:mixtral-8x7b",
        "random_weights": True,
      },
      "a mixture of experts is held in float32 or bfloat16",
    ),
    (
      {"weights": "stored", "target": "preset:llama3-1b",
       "random_weights": True},
      "has no file",
    ),
  ],
)  # fmt: skip
def test_refusals(settings, sentence):
  with pytest.raises(ValueError) as error:
    Setup(**{"target": "stdlib-1m", "drafter": "lookup"} | settings).load()
  assert sentence in str(error.value)


def test_layouts_are_told_apart_by_shape_alone():
  """A matrix of few outputs is not packed, and multiplied by XLA."""
  weight = Quantized(jnp.ones((5, 64), jnp.int4), jnp.ones((5, 2)))
  assert layouts.pack(weight, "cpu") is weight
  y = layouts.project(weight, jnp.ones((1, 1, 64)))
  np.testing.assert_array_equal(y, 64)


def test_sizes_of_a_stored_file(tmp_path):
  path = write(tmp_path / "m.gguf", kind=Kind.Q4_1)
  config = checkpoints.inspect(path, weights=STORED)
  matrices = CONFIG.num_parameters - 5 * CONFIG.width
  bits = 4 + 2 * 32 / 32  # a scale and an offset in float32 for 32 weights
  held = memory_plan.weight_bytes(config) - 4 * 5 * CONFIG.width
  assert held == matrices * bits / 8
  assert model_params.read_size(config) < 0.8


def test_a_group_that_no_matrix_has_is_refused_at_once():
  with pytest.raises(ValueError, match="do not divide 576 inputs; 576 do"):
    WeightFormat("int8", 10**12).groups(576)
