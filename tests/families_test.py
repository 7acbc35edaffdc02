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

from specdec import checkpoints
from specdec.models import weight_formats

PARITY = Path(__file__).parent / "fixtures" / "parity"
WEIGHTS = "model.safetensors"


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
  with pytest.raises(ValueError, match=r"gate_up_proj.* 0 rows; .* 80"):
    checkpoints.load(tmp_path)
