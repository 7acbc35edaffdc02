"""The real steps compile for a TPU that is not there, and are read right."""

import json
import os
import re
import subprocess
import sys

import pytest

import programs

SMALL = (
  "--mesh=model:4", "--target=preset:llama3-1b", "--draft=preset:llama3-1b",
  "--batch=2", "--context=512", "--k=3", "--acceptance=rejection",
  "--temperature=1",
)  # fmt: skip


def run(*arguments):
  return subprocess.run(
    [sys.executable, programs.SCRIPTS / "compile_tpu.py", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def test_a_small_preset_on_four_chips(tmp_path):
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  path = tmp_path / "steps.json"
  done = run(
    "--topology=v5e:2x2",
    "--steps=draft,verify,accept",
    f"--json={path}",
    *SMALL,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  document = json.loads(path.read_text())
  draft, verify, accept = document["steps"]
  layers, width, vocabulary = 16, 2048, 128_256
  sums = [x for x in verify["exchanges"] if x["kind"] == "all-reduce"]
  wide = [x for x in sums if any(width in shape for shape in x["shape"])]
  assert sum(x["times"] for x in wide) == 2 * layers + 1  # the embedding's
  for one in (*verify["exchanges"], *accept["exchanges"]):
    for shape in one["shape"]:
      assert vocabulary not in shape and vocabulary // 4 not in shape, one
    # No weights, no KV and no distribution travel: what does is one step's
    # streams, or a few numbers of every draft token.
    assert one["kind"] == "all-reduce" or one["bytes"] < 4096, one
  for step in (draft, verify):
    moved = step["read"] + step["written"]
    expected = document["cost_model"][step["step"]]["bytes"]
    assert 0.9 < moved / expected < 1.15, step["step"]
  assert verify["temporaries"] < 32 * 2**20
  assert all(step["fits"] for step in document["steps"])


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--topology=v9:1x1"], "known to work: v4:2x2x1, v5e:2x2"),
    (["--topology=v5e:2x2", "--mesh=model:8"], "there are 4"),
    (["--topology=v5e:2x2", "--steps=think"], "--steps=think; known: prefill"),
  ],
)
def test_what_cannot_be_compiled_is_said(arguments, sentence):
  pytest.importorskip("libtpu", reason="libtpu is not installed")
  done = run(*SMALL, *arguments)
  assert done.returncode == 1
  assert sentence in done.stderr, done.stderr[-500:]
  assert "Traceback" not in done.stderr


def test_the_default_target_is_found():
  """In a process of its own: bench has a flag --context, too."""
  program = """
import jax, programs, compile_tpu
compile_tpu.devices = jax.devices
compile_tpu.apart = lambda name: {"step": name, "error": "no compiler"}
programs.run("compile_tpu", "--mesh=model:1", "--k=2")
"""
  root = programs.SCRIPTS.parent
  folders = [root, root / "tests", programs.SCRIPTS]
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    capture_output=True,
    text=True,
  )
  assert re.search("accept.*: not compiled", done.stderr), done.stderr
