"""Two processes on one machine write what one writes."""

import json
import socket
import subprocess
import sys

import pytest

import programs
import virtual


def generate(*arguments, devices=2):
  return subprocess.Popen(
    [sys.executable, programs.SCRIPTS / "generate.py", *arguments],
    env=virtual.environment(devices),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
  target = programs.write_model(
    tmp_path_factory.mktemp("target"), num_heads=2, vocab_size=28
  )
  draft = programs.write_model(
    tmp_path_factory.mktemp("draft"), seed=1, vocab_size=28
  )
  prompts = tmp_path_factory.mktemp("prompts") / "p.jsonl"
  prompts.write_text('{"prompt": "ab"}\n{"prompt": "cabcab"}\n' * 2)
  return [
    f"--target={target}", f"--drafter=model({draft})",
    f"--prompt_file={prompts}",
    "--batch=4", "--k=2", "--max_new_tokens=8", "--compilation_cache=",
    "--acceptance=rejection", "--temperature=1", "--color=never",
  ]  # fmt: skip


def token_ids(path):
  prompts = json.loads(path.read_text())["prompts"]
  return [prompt["token_ids"] for prompt in prompts]


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
  path = tmp_path_factory.mktemp("alone") / "a.json"
  programs.run("generate", *common, f"--json={path}")
  return token_ids(path)


@pytest.mark.parametrize("mesh, devices", [("data:4", 2), ("model:2", 1)])
def test_two_processes_equal_one(common, alone, tmp_path, mesh, devices):
  """Rows go to each, or every matrix product crosses from one to the other."""
  port = free_port()
  pair = [
    generate(
      *common,
      "--distributed",
      f"--coordinator=127.0.0.1:{port}",
      "--processes=2",
      f"--process={i}",
      f"--mesh={mesh}",
      f"--json={tmp_path / f'{i}.json'}",
      devices=devices,
    )
    for i in range(2)
  ]
  outputs = [one.communicate(timeout=300) for one in pair]
  for one, (_, errors) in zip(pair, outputs):
    assert one.returncode == 0, errors[-2000:]
  assert "speedup" in outputs[0][0]
  # The second is silent, but for a library's own greeting, and writes nothing.
  lines = outputs[1][0].splitlines()
  printed = [line for line in lines if not line.startswith("[Gloo]")]
  assert (printed, outputs[1][1]) == ([], "")
  assert not (tmp_path / "1.json").exists()
  assert token_ids(tmp_path / "0.json") == alone


def test_who_is_not_there_is_named(common):
  port = free_port()
  done = generate(
    *common, "--distributed", f"--coordinator=127.0.0.1:{port}",
    "--processes=2", "--process=1", "--patience=1", "--mesh=data:2",
  )  # fmt: skip
  _, errors = done.communicate(timeout=120)
  assert done.returncode == 1
  assert f"127.0.0.1:{port} was not reached in 1 s" in errors


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--mesh=data:2,model:2"], r"needs 4 devices; there (is|are) \d"),
    (["--processes=2"], "go together"),
    (["--distributed"], "--distributed needs --mesh"),
    (
      [
        "--distributed",
        "--coordinator=127.0.0.1:1",
        "--processes=2",
        "--process=2",
        "--mesh=data:2",
      ],
      r"--process=2; it must be in 0\.\.1",
    ),
  ],
)
def test_meshes_that_cannot_be_are_refused(common, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    programs.run("generate", *common, *arguments)
