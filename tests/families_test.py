"""What families of models differ in: decoding, files, quantised weights.

The recorded models come from tests/tools/record_parity.py; their logits are
compared in transformer_test.py.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from families import DRAFTERS, LENGTHS, decoded, recorded
from specdec import checkpoints
from specdec.models import transformer, weight_formats
from texts import forward, texts

PARITY = Path(__file__).parent / "fixtures" / "parity"
WEIGHTS = "model.safetensors"

# Of each recorded model with something new, what a text passes: the end of a
# window, the original context of a scaling, layers without rotation, several.
PASSED = {
  "qwen3_yarn": 16,
  "llama_longrope": 16,
  "gemma3_images": 5,
  "phi3_window": 5,
  "phi3_longrope": 16,
  "smollm3": 5,
  "olmo2": 0,
  "gpt_oss": 16,
  "llama4": 15,
  "deepseek_v3": 16,
}
SLOW = pytest.mark.slow


def cases():
  """Each drafter with some family; all of both are slow."""
  quick = {
    ("qwen3_yarn", "model"),
    ("llama_longrope", "lookup"),
    ("gemma3_images", "lookup"),
    ("phi3_window", "early_exit"),
    ("phi3_longrope", "tree"),
    ("smollm3", "layer_skip"),
    ("smollm3", "eagle3"),
    ("olmo2", "early_exit"),
    ("olmo2", "mtp"),
    ("gpt_oss", "tree"),
    ("gpt_oss", "early_exit"),
    ("gpt_oss", "eagle3"),
    ("llama4", "tree"),
    ("llama4", "layer_skip"),
    ("llama4", "mtp"),
    ("deepseek_v3", "tree"),
    ("deepseek_v3", "layer_skip"),
    ("deepseek_v3", "mtp"),
  }
  for name in PASSED:
    for drafter in (*list(DRAFTERS)[1:], "eagle3", "mtp"):
      slow = (name, drafter) not in quick
      yield pytest.param(name, drafter, marks=SLOW if slow else ())


@pytest.mark.parametrize("name, drafter", list(cases()))
def test_coupled_text_is_autoregressive_text(name, drafter):
  state, alone = decoded(name, drafter), decoded(name, "baseline")
  assert texts(state) == texts(alone)
  assert np.asarray(alone.length).min() > PASSED[name] + 5
  assert min(LENGTHS) < 5
  assert state.stats.accepted.sum() > 0


def test_integers_of_every_option_and_layers_that_are_left_out():
  """An int8 target drafts for itself with half of its sublayers."""
  for name in ("smollm3", "olmo2", "phi3_longrope"):
    held = recorded(name, "int8")
    assert held.config.is_quantized
    state = decoded(name, "layer_skip", weights="int8")
    assert texts(state) == texts(decoded(name, "baseline", weights="int8"))


@pytest.mark.parametrize("name", PASSED)
def test_packed_weights_give_the_recorded_logits(name):
  """As decoding on a CPU has them, with kernels of its own where there are."""
  loaded = checkpoints.load(PARITY / name).packed()
  expected = load_file(PARITY / name / "expected.safetensors")
  model = transformer.model(loaded.config)
  logits = forward(model, loaded.params, expected["tokens"])
  np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["bamba", "deepseek_v3", "llama4"])
def test_64_bits_change_no_logit(name, batch):
  """A model that is called by itself, without the loop."""
  loaded = recorded(name)
  model = transformer.model(loaded.config)
  tokens = np.arange(batch * 6, dtype=np.int32).reshape(batch, 6)
  expected = forward(model, loaded.params, tokens)
  with jax.enable_x64(True):
    logits = forward(model, loaded.params, tokens)
  assert logits.dtype == np.float32
  np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("weights", ["int8", "int8(group=8)", "int4(group=8)"])
def test_quantised_matrices_are_fused_and_split(tmp_path, weights):
  form = weight_formats.parse(weights)
  held = checkpoints.load(PARITY / "phi3_window", weights=form)
  checkpoints.save_safetensors(tmp_path, held.params, held.config)
  written = load_file(tmp_path / WEIGHTS)
  attention = "model.layers.0.self_attn.qkv_proj.weight"
  assert written[f"{attention}_scale"].shape[0] == 64
  assert not any(".q_proj" in name for name in written)
  stored = weight_formats.parse("stored")
  again = checkpoints.load(tmp_path, weights=stored)
  jax.tree.map(np.testing.assert_array_equal, again.params, held.params)
  assert again.config.fused


def test_a_fused_matrix_of_another_size_is_refused(tmp_path):
  shutil.copytree(PARITY / "phi3_window", tmp_path, dirs_exist_ok=True)
  arrays = load_file(tmp_path / WEIGHTS)
  name = "model.layers.1.mlp.gate_up_proj.weight"
  arrays[name] = arrays[name][:-1].copy()
  save_file(arrays, tmp_path / WEIGHTS)
  with pytest.raises(ValueError, match=r"gate_up_proj.* 79 rows; .* 80"):
    checkpoints.load(tmp_path)
  del arrays[name]
  save_file(arrays, tmp_path / WEIGHTS)
  with pytest.raises(ValueError, match=r"lacks .*gate_up_proj"):
    checkpoints.load(tmp_path)
