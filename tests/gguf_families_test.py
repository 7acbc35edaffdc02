"""GGUF files of every family hold what the Hugging Face directories hold."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import traverse_util

from gguf_files import write
from specdec import checkpoints
from specdec.checkpoints import gguf

PARITY = Path(__file__).parent / "fixtures" / "parity"
WINDOW = {"attention.sliding_window": 5}
MIXTRAL = {"expert_count": 4, "expert_used_count": 2}
EXPERTS = {"feed_forward_length": 99, "expert_feed_forward_length": 16}


def recorded(name, **changes):
  """(config, flat parameters) of a recorded model."""
  checkpoint = checkpoints.load(PARITY / name)
  config = dataclasses.replace(checkpoint.config, **changes)
  flat = traverse_util.flatten_dict(checkpoint.params, sep="/")
  return config, {key: np.asarray(value) for key, value in flat.items()}


def metadata(config, **keys):
  return {
    "attention.key_length": config.head_dim,
    "rope.freq_base": config.rope_theta,
    "rope.dimension_count": None,
  } | keys


@pytest.mark.parametrize(
  "arch, name, changes, keys",
  [
    ("qwen2", "qwen2_window", {"windows": ()}, {}),
    ("qwen3", "qwen3", {}, {}),
    (
      "gemma2",
      "gemma2",
      {"query_scalar": 12},
      WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    (
      "gemma3",
      "gemma3",
      {"query_scalar": 12},
      WINDOW
      | {
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 100.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 3.0,
      },
    ),
    (
      "llama",
      "mixtral",
      {},
      WINDOW | {"expert_count": 4, "expert_used_count": 2},
    ),
    (
      "qwen3moe",
      "qwen3_moe_normalized",
      {},
      EXPERTS | {"expert_count": 8, "expert_used_count": 3},
    ),
  ],
)
def test_equals_the_hugging_face_path(tmp_path, arch, name, changes, keys):
  config, params = recorded(name, **changes)
  keys = metadata(config, **keys)
  path = write(tmp_path / "m.gguf", params, config, arch=arch, **keys)
  checkpoint = checkpoints.load(path)
  assert checkpoint.config == config
  loaded = traverse_util.flatten_dict(checkpoint.params, sep="/")
  assert loaded.keys() == params.keys()
  for key, value in params.items():
    # Where the file holds 1 + scale, scale keeps the absolute precision of 1.
    atol = 1.2e-7 * (config.norm_offset and key.endswith("/scale"))
    np.testing.assert_allclose(loaded[key], value, rtol=0, atol=atol)


@pytest.mark.parametrize(
  "arch, keys, field, value",
  [
    ("gemma2", {}, "windows", (4096, None)),
    ("gemma2", {}, "logit_softcap", 30.0),
    ("gemma2", {"block_count": 46}, "query_scalar", 32 // 4),
    ("gemma3", {"block_count": 62}, "query_scalar", 32 // 4),
    ("gemma3", {}, "query_scalar", 12),
    ("gemma3", {}, "windows", ()),
    ("gemma3", {}, "local_rope_theta", None),
    ("gemma3", WINDOW, "windows", (5, 5)),
    ("gemma3", WINDOW, "local_rope_theta", 10_000.0),
    ("gemma3", {"final_logit_softcapping": 7.0}, "logit_softcap", 7.0),
  ],
)
def test_what_llama_cpp_knows_without_the_file(
  tmp_path, arch, keys, field, value
):
  config, params = recorded("gemma2")
  keys = metadata(config, **keys)
  path = write(tmp_path / "m.gguf", params, config, arch=arch, **keys)
  assert getattr(checkpoints.inspect(path), field) == value


def test_a_flag_a_layer_places_the_windows(tmp_path):
  config, params = recorded("gemma3")

  def flags(writer):
    key = "gemma3.attention.sliding_window_pattern"
    writer.add_array(key, [True, False, False, True])

  keys = metadata(config, **WINDOW)
  path = write(
    tmp_path / "m.gguf", params, config, arch="gemma3", change=flags, **keys
  )
  assert gguf.config(gguf.Weights(path), "float32").windows == (
    5,
    None,
    None,
    5,
  )


@pytest.mark.parametrize(
  "arch, keys, sentence",
  [
    ("qwen3", WINDOW, "= 5 without specifying its layers"),
    ("gemma2", {"rope.freq_base_swa": 5.0}, "freq_base_swa is not implemented"),
    ("gemma3", {"attention.scale": 0.5}, "attention.scale, not implemented"),
  ],
)
def test_refusals(tmp_path, arch, keys, sentence):
  config, params = recorded("gemma2")
  keys = metadata(config, **keys)
  path = write(tmp_path / "m.gguf", params, config, arch=arch, **keys)
  with pytest.raises(ValueError, match=sentence):
    checkpoints.inspect(path)
