"""Drafters of other formats through the programs: converted, and decoding."""

import dataclasses
import json
import re
import shlex
import string

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import formats_test
import programs
import specdec
from specdec import checkpoints
from specdec.checkpoints import learned
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig

LAYERS = dict(
  layout="published",
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)


def head(layout, kind, **options):
  return HeadConfig(kind, **LAYERS | options), layout


def block(layout, features, **options):
  config = BlockConfig(mask_token=5, **options)
  return head(layout, "block", features=features, head="shared", block=config)


THREE = dict(features=(0, 1, 2), embed="own")
MTP = dict(head="shared", feeds_back_norm=True, qk_norm=True)
MEDUSA = dict(layout="published", width=16, num_layers=0, levels=3)
DSPARK = dict(slots="next", successor="markov", rank=3, confidence=True)
DFLASH2 = dict(successor="selector", rank=3, candidates=5, taps=2, group=4)
HEADS = {
  "eagle3": head("speculators", "eagle3", **THREE),
  "mtp": head("speculators", "mtp", **MTP),
  "eagle": head("eagle", "eagle", head="shared", bias=True),
  "medusa": (HeadConfig("medusa", **MEDUSA), "medusa"),
  "peagle": head("speculators", "peagle", mask_token=5, **THREE),
  "peagle_of_vllm": head("eagle", "peagle", features=(1,), mask_token=5),
  "dflash2": block("dflash", (1,), **DFLASH2),
  "dflash": block("dflash", (1,)),
  "dspark": block("deepspec", (0, 1), **DSPARK),
  "dspark_of_speculators": block("speculators", (0, 1), **DSPARK),
}


def convert(target, source, output, *flags):
  programs.run(
    "convert",
    f"--source={source}",
    f"--target={target}",
    f"--output={output}",
    *flags,
  )


def write(name, place, target):
  """Writes a drafter, and the same into a folder in another format."""
  head_config, layout = HEADS[name]
  path = place / f"{name}.safetensors"
  programs.save_drafter(target, path, head_config)
  convert(target, path, place / name, f"--layout={layout}")
  return path


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_drafter_goes_there_and_back(name, tmp_path, target, capsys):
  head_config, layout = HEADS[name]
  place, kind = tmp_path, head_config.kind
  path = write(name, place, target)
  *_, what, use = capsys.readouterr().out.splitlines()
  assert f"{name}: {kind} for " in what
  _, _, command = use.partition("python scripts/generate.py ")
  flags = [f"--target={target}", f"--drafter=head({place / name})"]
  assert shlex.split(command) == flags
  convert(target, place / name, place / f"{name}_back", "--layout=specdec")
  assert f"{name}_back/drafter.safetensors" in capsys.readouterr().out
  loaded = checkpoints.load(target)
  first = learned.load(path, loaded)
  last = learned.load(place / f"{name}_back" / "drafter.safetensors", loaded)
  jax.tree.map(np.testing.assert_array_equal, first.net, last.net)
  # SafeAILab's config does not say how many levels it was trained for.
  levels = {"levels": 4} if layout == "eagle" else {}
  expected = dataclasses.replace(first.head_config, **levels)
  assert last.head_config == expected
  programs.run(
    "generate",
    *flags,
    "--k=2",
    "--prompt=def a1(x):",
    "--max_new_tokens=12",
  )
  assert re.search(r"same text as the baseline +yes", capsys.readouterr().out)


def test_copies_of_the_targets_tables_are_left_out_and_written(
  target, tmp_path
):
  """DeepSpec's files hold both; what differs in one number stays its own."""
  head_config, _ = HEADS["dspark"]
  own = dataclasses.replace(head_config, embed="own", head="own")
  programs.save_drafter(target, tmp_path / "own.safetensors", own)
  convert(
    target, tmp_path / "own.safetensors", tmp_path / "b", "--layout=deepspec"
  )
  path = tmp_path / "b" / "model.safetensors"
  loaded, arrays = checkpoints.load(target), load_file(path)
  assert learned.load(path.parent, loaded).head_config == own
  theirs = load_file(target / "model.safetensors")
  arrays["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
  arrays["lm_head.weight"] = theirs["lm_head.weight"].copy()
  save_file(arrays, path)
  read = learned.load(path.parent, loaded)
  assert read.head_config == head_config
  assert not {"embed_table", "head"} & {*read.net}
  convert(target, path.parent, tmp_path / "c", "--layout=speculators")
  convert(target, path.parent, tmp_path / "d", "--layout=deepspec")
  again = load_file(tmp_path / "d" / "model.safetensors")
  assert {*again} == {*arrays}
  for name, array in arrays.items():
    np.testing.assert_array_equal(again[name], array, name)
  arrays["lm_head.weight"][3, 5] += 1e-3
  save_file(arrays, path)
  read = learned.load(path.parent, loaded)
  assert (read.head_config.embed, read.head_config.head) == ("shared", "own")


def test_copies_are_left_out_where_the_target_is_packed(tmp_path):
  """A CPU's decoder has its tables in blocks of 32 rows, or of 16."""
  letters = [*string.ascii_lowercase, *"ABCDEF"]
  target = programs.write_model(tmp_path / "target", letters=letters)
  head_config, folder = HEADS["dspark"][0], tmp_path / "theirs"
  own = dataclasses.replace(head_config, embed="own", head="own")
  programs.save_drafter(target, tmp_path / "own.safetensors", own)
  convert(target, tmp_path / "own.safetensors", folder, "--layout=deepspec")
  path = folder / "model.safetensors"
  arrays, theirs = load_file(path), load_file(target / "model.safetensors")
  arrays["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
  arrays["lm_head.weight"] = theirs["lm_head.weight"]
  save_file(arrays, path)
  decoder = specdec.load(str(target), drafter=f"block({folder})", k=2)
  assert decoder.params.target["embed"]["weight"].ndim == 3
  assert not {"embed_table", "head"} & {*decoder.params.draft["net"]}


def test_what_is_written_names_the_target(tmp_path, target):
  write("eagle3", tmp_path, target)
  config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
  verifier = config["speculators_config"]["verifier"]
  assert verifier == {
    "name_or_path": str(target),
    "architectures": ["LlamaForCausalLM"],
  }
  assert config["dtype"] == "float32"
  arrays = load_file(tmp_path / "eagle3" / "model.safetensors")
  assert arrays["layers.0.self_attn.q_proj.weight"].shape == (16, 32)


def test_a_drafter_of_another_tokenizer_is_refused(target, tmp_path):
  write("eagle", tmp_path, target)
  letters = [" ", *map(chr, range(ord("a"), ord("z") + 1))]
  other = programs.write_model(tmp_path / "other", letters=letters)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    if (other / name).is_file():
      (tmp_path / "eagle" / name).write_bytes((other / name).read_bytes())
  with pytest.raises(SystemExit, match="different vocabularies"):
    programs.run(
      "generate",
      f"--target={target}",
      f"--drafter=eagle({tmp_path / 'eagle'})",
      "--prompt=a",
    )


@pytest.mark.parametrize(
  "family, architecture, prefix",
  [
    ("DeepSeek MTP", "LlamaForCausalLM", "model.layers.2."),
    ("MiMo MTP", "MiMoForCausalLM", "model.mtp_layers.0."),
    ("Qwen MTP", "Qwen3ForCausalLM", "mtp."),
  ],
)
def test_a_models_own_mtp_layer_drafts_for_it(
  family, architecture, prefix, tmp_path, capsys
):
  options = {
    "MiMoForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
  }
  folder = programs.write_model(
    tmp_path / "model",
    width=8,
    mlp_width=12,
    head_dim=4,
    **options.get(architecture, {}),
  )
  manifest = formats_test.MANIFESTS[family]
  own = formats_test.arrays_of(manifest)
  mark = prefix.replace(".2.", ".6.")
  rows = {"embed_tokens", "shared_head.head"}
  arrays = load_file(folder / "model.safetensors")
  for name, array in own.items():
    if not name.startswith(mark):
      continue
    if any(x in name for x in rows):
      array = arrays["model.embed_tokens.weight"]
    arrays[name.replace(mark, prefix)] = array
  save_file(arrays, folder / "model.safetensors")
  config = json.loads((folder / "config.json").read_text())
  config |= {"architectures": [architecture], "num_nextn_predict_layers": 1}
  config.pop("attention_bias", None)
  (folder / "config.json").write_text(json.dumps(config))
  programs.run(
    "generate",
    f"--target={folder}",
    f"--drafter=mtp({folder})",
    "--k=2",
    "--prompt=def a1(x):",
    "--max_new_tokens=12",
  )
  printed = capsys.readouterr().out
  assert re.search(r"same text as the baseline +yes", printed)
