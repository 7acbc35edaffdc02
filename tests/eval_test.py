"""The program eval on a tiny model."""

import json
import shutil

import jax.numpy as jnp
import pytest
from flax import traverse_util

import programs
from specdec import checkpoints

ENTRIES = [
  {"question_id": 7, "category": "writing", "turns": ["hello there", "more"]},
  {"question_id": 9, "category": "coding", "turns": ["abcabcabc"]},
  {"category": "translation", "prompt": "ein zwei drei"},
  {"category": "translation", "prompt": "vier"},
  {"category": "translation", "prompt": "drei vier"},
  {"token_ids": [1, 2, 3, 1, 2, 3]},
]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.jsonl"
  path.write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
  return path


@pytest.fixture
def evaluate(target, file, tmp_path):
  def call(*arguments):
    programs.run(
      "eval",
      f"--target={target}",
      f"--prompt_file={file}",
      f"--output={tmp_path / 'out'}",
      "--max_new_tokens=10",
      "--drafter=lookup(min_ngram=1)",
      *arguments,
    )
    return json.loads((tmp_path / "out" / "results.json").read_text())

  return call


def test_a_text_that_is_not_finite_is_named_and_the_others_count(
  evaluate, target, file, tmp_path
):
  """Every weight is finite; letter z, alone on its axis, makes infinity."""
  checkpoint = checkpoints.load(target)
  flat = traverse_util.flatten_dict(checkpoint.params, sep=".")
  axis = jnp.zeros(16).at[0].set(1e3)  # 4 after the norm
  up = flat["layer_0.mlp.up.weight"].at[:, 0].set(0.9e38)
  flat |= {
    "embed.weight": flat["embed.weight"].at[25].set(axis),
    "layer_0.mlp.up.weight": up,
  }
  params = traverse_util.unflatten_dict(flat, sep=".")
  broken = tmp_path / "broken"
  shutil.copytree(target, broken)
  checkpoints.save_safetensors(broken, params, checkpoint.config)
  file.write_text('{"prompt": "azc"}\n{"prompt": "abc"}\n')
  document = evaluate(f"--target={broken}", "--k=2", "--batch=2")
  [fault] = document["caveats"]
  assert fault.startswith("prompt 0 ends at token 3 of prompt and output, wh")
  *_, run = document["runs"]
  assert run["acceptance"]["emitted"] == 10
  file.write_text('{"prompt": "azc"}\n{"prompt": "zbc"}\n')
  with pytest.raises(SystemExit, match="prompt 0 ends at token 3"):
    evaluate(f"--target={broken}", f"--output={tmp_path / 'none'}")


def test_one_group_alone_is_printed_once(evaluate, file, capsys):
  file.write_text('{"prompt": "abcabc"}\n{"prompt": "cabcab"}\n')
  document = evaluate("--k=2")
  assert [run["group"] for run in document["runs"]] == ["mine", "all"]
  lines = capsys.readouterr().out.splitlines()
  names = [line.split()[0] for line in lines if line.startswith("  ")]
  assert names[:2] == ["group", "mine"] and "all" not in names


def test_whatever_a_kill_leaves_is_gone_on_with(evaluate, tmp_path):
  arguments = "--k=1,2", "--batch=2"
  whole = evaluate(*arguments)
  path = tmp_path / "out" / "lines.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  assert len(lines) == 4  # translation has two batches
  for cut in (0, 3):
    path.write_text("".join(lines[:cut]) + lines[cut][:20])
    again = evaluate(*arguments)
    kept = path.read_text()
    assert kept.startswith("".join(lines[:cut]))
    assert len(kept.splitlines()) == len(lines) + 1  # and the cut one
    for a, b in zip(whole["runs"], again["runs"]):
      assert a["acceptance"] == b["acceptance"]
  before = path.read_text()
  evaluate(*arguments)
  assert path.read_text() == before  # nothing is decoded twice
  with pytest.raises(
    SystemExit, match=r"other settings \(k: \[1, 2\] -> \[2\]"
  ):
    evaluate("--k=2", "--batch=2")
