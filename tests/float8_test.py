"""Checkpoints in floats of eight and four bits, against their formats.

The logits of one of them are compared with transformers' in transformer_test.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from families import PARITY
from gguf_files import CONFIG, random_params
from specdec import checkpoints
from specdec.checkpoints import float8, mxfp4
from specdec.models import weight_formats

WEIGHTS = "model.safetensors"
# With a part of a block at the ends of rows and of columns.
WIDE = dataclasses.replace(CONFIG, num_layers=1, width=160, mlp_width=200)
PHI = dataclasses.replace(WIDE, fused=True, rotary_dims=8)
EXPERTS = dataclasses.replace(
  WIDE, num_experts=2, experts_per_token=1, qk_norm=True
)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def scheme(strategy, **options):
  weights = {"type": "float", "num_bits": 8, "strategy": strategy}
  group = {
    "weights": weights | options,
    # What an engine does with activations is no matter of the weights.
    "input_activations": {"type": "float", "num_bits": 8, "dynamic": True},
  }
  return {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": group},
  }


FORMS = {  # quantization_config, end of the scales' names, their shape
  "blocks": (BLOCKS, "_scale_inv", lambda n, m: (-(-n // 128), -(-m // 128))),
  "tensor": (scheme("tensor"), "_scale", lambda n, m: (1,)),
  "channel": (scheme("channel"), "_scale", lambda n, m: (n, 1)),
  "block": (
    scheme("block", block_structure=[128, 128]),
    "_scale",
    lambda n, m: (-(-n // 128), -(-m // 128)),
  ),
}


def rescaled(matrix, scale):
  """Each weight times its scale, one by one."""
  scale = np.atleast_2d(scale).astype(np.float32)
  if scale.size == 1:
    return matrix * scale
  if scale.shape == (len(matrix), 1):
    return matrix * scale
  rows = np.arange(matrix.shape[0])[:, None] // 128
  columns = np.arange(matrix.shape[1])[None] // 128
  return matrix * scale[rows, columns]


def write(folder, form, config=WIDE):
  """Writes a model in float8; returns what its tensors stand for, by name."""
  params = traverse_util.unflatten_dict(random_params(config), sep="/")
  checkpoints.save_safetensors(folder, params, config)
  quantization, end, shape = FORMS[form]
  arrays, meant = load_file(folder / WEIGHTS), {}
  rng = np.random.default_rng(1)
  for name in list(arrays):
    meant[name] = arrays[name]
    if "_proj" not in name:
      continue
    scale = rng.uniform(0.5, 2, shape(*arrays[name].shape)).astype(np.float32)
    arrays[name] = arrays[name].astype(ml_dtypes.float8_e4m3fn)
    arrays[name + end] = scale
    meant[name] = rescaled(arrays[name].astype(np.float32), scale)
    if form == "tensor":
      arrays[name.removesuffix("weight") + "input_scale"] = np.ones(1)
  save_file(arrays, folder / WEIGHTS)
  path = folder / "config.json"
  document = json.loads(path.read_text())
  document["quantization_config"] = quantization
  path.write_text(json.dumps(document))
  return meant


@pytest.mark.parametrize(
  "config", [WIDE, PHI, EXPERTS], ids=["llama", "phi3", "experts"]
)
@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_what_their_scales_make_of_them(tmp_path, form, config):
  meant = write(tmp_path, form, config)
  loaded = checkpoints.load(tmp_path)
  assert loaded.config == config
  again = tmp_path / "again"
  checkpoints.save_safetensors(again, loaded.params, loaded.config)
  ours = load_file(again / WEIGHTS)
  assert ours.keys() == meant.keys()
  jax.tree.map(np.testing.assert_array_equal, ours, meant)
  assert "quantization_config" not in (again / "config.json").read_text()
  rounded = checkpoints.load(tmp_path, "bfloat16").params
  jax.tree.map(
    np.testing.assert_array_equal,
    rounded,
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params),
  )


def test_any_part_of_a_matrix_is_read_alone():
  rng = np.random.default_rng(0)
  values = rng.normal(size=(300, 200)).astype(ml_dtypes.float8_e4m3fn)
  for scale in ((), (1,), (1, 1), (300,), (300, 1), (3, 2)):
    scale = rng.uniform(1, 2, scale).astype(np.float32)
    whole = float8.dequantize(values, scale, (slice(None), slice(None)))
    rows, columns = slice(100, 290), slice(30, 170)
    for index in ((rows, columns), (slice(5), slice(190, 200))):
      part = float8.dequantize(values, scale, index)
      np.testing.assert_array_equal(part, whole[index])
  assert float8.blocks((300, 200), (2, 2)) is None


def test_it_can_be_held_in_integers_and_not_as_it_is_stored(tmp_path):
  int8 = weight_formats.parse("int8")
  loaded = checkpoints.load(PARITY / "qwen3_fp8", weights=int8)
  assert loaded.params["layer_0"]["mlp"]["up"]["weight"].values.dtype == "int8"
  with pytest.raises(ValueError, match="no matrix that can be kept as it is"):
    checkpoints.load(
      PARITY / "qwen3_fp8", weights=weight_formats.parse("stored")
    )


def changed(folder, **options):
  path = folder / "config.json"
  document = json.loads(path.read_text())
  document["quantization_config"] |= options
  path.write_text(json.dumps(document))


def weights_with(**options):
  weights = scheme("channel")["config_groups"]["group_0"]["weights"]
  return {"group": {"weights": weights | options}}


@pytest.mark.parametrize(
  "form, options, sentence",
  [
    ("blocks", {"weight_block_size": None}, r"size = None; accepted: \[128"),
    ("blocks", {"weight_block_size": [1, 32]}, r"size = \[1, 32\]; accepted"),
    ("blocks", {"fmt": "e5m2"}, "fmt = 'e5m2'; accepted: 'e4m3'"),
    ("blocks", {"quant_method": "gptq"},
     "by 'gptq'; accepted: compressed-tensors, fp8"),
    ("tensor", {"quant_method": "modelopt"}, "by 'modelopt'; accepted"),
    ("tensor", {"format": "nvfp4-pack-quantized"},
     "accepted: int-quantized, pack-quantized, float-quantized"),
    ("tensor", {"config_groups": None}, "has no config_groups"),
    ("tensor", {"kv_cache_scheme": {"num_bits": 8}}, "has kv_cache_scheme"),
    ("channel", {"config_groups": {"a": 1}}, "has type = None; accepted"),
    ("channel", {"config_groups": weights_with(num_bits=4)}, "num_bits = 4"),
    ("channel", {"config_groups": weights_with(strategy="group")},
     "strategy = 'group'; accepted: 'tensor' or 'channel' or 'block'"),
    ("channel",
     {"config_groups": {"a": weights_with()["group"]
                        | {"output_activations": {"num_bits": 8}}}},
     "quantises output_activations"),
    ("block", {"config_groups": weights_with(strategy="block")},
     "block_structure = None; accepted"),
  ],
)  # fmt: skip
def test_other_schemes_are_refused(tmp_path, form, options, sentence):
  write(tmp_path, form)
  changed(tmp_path, **options)
  with pytest.raises(ValueError, match=sentence):
    checkpoints.load(tmp_path)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
  write(tmp_path, "blocks")
  whole = load_float8(tmp_path)
  name = "model.layers.0.mlp.down_proj.weight"
  scale = whole[name + "_scale_inv"]
  for arrays, sentence in (
    ({name + "_scale_inv": scale[:1]}, r"scale_inv has shape \(1, 2\), and"),
    ({name: np.ones((160, 200), np.float32)}, "as F32; accepted: F8_E4M3"),
    ({name + "_scale_inv": None}, r"as F8_E4M3; accepted: F64"),
    ({name: None}, r"scale_inv has shape \(2, 2\), and .* \(\)"),
  ):
    arrays = {k: x for k, x in (whole | arrays).items() if x is not None}
    save_file(arrays, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=sentence):
      checkpoints.load(tmp_path)


def load_float8(folder):
  """What safetensors' own reader for numpy has no type for."""
  path = folder / WEIGHTS
  mapped = float8.Mapped(path)
  arrays = {}
  for name, entry in json.loads(path.read_bytes()[8 : mapped.start]).items():
    if name == "__metadata__":
      continue
    if entry["dtype"] == "F8_E4M3":
      arrays[name] = np.array(mapped.tensor(name))
      continue
    start, stop = entry["data_offsets"]
    raw = path.read_bytes()[mapped.start :][start:stop]
    arrays[name] = np.frombuffer(raw, np.float32).reshape(entry["shape"])
  return arrays


def test_scales_that_do_not_fit_their_mxfp4_blocks_are_refused(tmp_path):
  shutil.copytree(PARITY / "gpt_oss_mxfp4", tmp_path, dirs_exist_ok=True)
  arrays = load_file(tmp_path / "model.safetensors")
  name = "model.layers.0.mlp.experts.down_proj_scales"
  arrays[name] = arrays[name][:, :-1].copy()
  save_file(arrays, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"down_proj_blocks has shape .* scales"):
    checkpoints.load(tmp_path)
  del arrays[name]
  save_file(arrays, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match="its scales None"):
    checkpoints.load(tmp_path)


def test_mxfp4_numbers_by_hand():
  """Low bits first: 1.5 and -6, times 2 ** -1."""
  blocks = np.zeros((1, 16), np.uint8)
  blocks[0, 0] = 3 | 15 << 4
  numbers = mxfp4.dequantize(blocks, np.array([126], np.uint8))
  np.testing.assert_array_equal(numbers[:3].astype(float), [0.75, -3, 0])
