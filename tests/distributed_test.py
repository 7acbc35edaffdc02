"""Two processes on one machine write what one writes."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

import programs
import virtual
from tiny_training import DECODING, SHAPE, log, write_config, write_letters


def generate(*arguments, devices=2, program="generate"):
  return subprocess.Popen(
    [sys.executable, programs.SCRIPTS / f"{program}.py", *arguments],
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


def run_pair(arguments_of, **options):
  """Runs a program as two processes that find each other.

  Returns [(stdout, stderr)] of both; arguments_of(i) are those of process i.
  """
  port = free_port()
  pair = [
    generate(
      *arguments_of(i),
      "--distributed",
      f"--coordinator=127.0.0.1:{port}",
      "--processes=2",
      f"--process={i}",
      **options,
    )
    for i in range(2)
  ]
  outputs = [one.communicate(timeout=600) for one in pair]
  for one, (_, errors) in zip(pair, outputs):
    assert one.returncode == 0, errors[-2000:]
  return outputs


def token_ids(path):
  prompts = json.loads(path.read_text())["prompts"]
  return [prompt["token_ids"] for prompt in prompts]


@pytest.fixture(scope="module")
def alone(common, tmp_path_factory):
  path = tmp_path_factory.mktemp("alone") / "a.json"
  programs.run("generate", *common, f"--json={path}")
  return token_ids(path)


@pytest.mark.parametrize(
  "mesh, devices",
  [pytest.param("data:4", 2, marks=pytest.mark.slow), ("model:2", 1)],
)
def test_two_processes_equal_one(common, alone, tmp_path, mesh, devices):
  """Rows go to each, or every matrix product crosses from one to the other."""
  outputs = run_pair(
    lambda i: [*common, f"--mesh={mesh}", f"--json={tmp_path / f'{i}.json'}"],
    devices=devices,
  )
  assert "speedup" in outputs[0][0]
  # The second is silent, but for a library's own greeting, and writes nothing.
  lines = outputs[1][0].splitlines()
  printed = [line for line in lines if not line.startswith("[Gloo]")]
  assert (printed, outputs[1][1]) == ([], "")
  assert not (tmp_path / "1.json").exists()
  assert token_ids(tmp_path / "0.json") == alone


OPTIONS = dict(
  steps=4, batch=4, sequence=8, warmup=1, log_every=1, eval_every=4,
  save_every=2, eval_sequences=4,
)  # fmt: skip
HEAD = dict(kind="eagle3", levels=2, features=(0, 2), vocabulary=11, **SHAPE)
SOFT = dict(divergence="forward_kl")
MARKOV = dict(slots="next", successor="markov", rank=4, confidence=True)
TRAINED = {  # those that are drawn for have an address in the whole batch
  "eagle3": dict(head_config=HEAD, loss=SOFT),
  "dspark": dict(
    head_config=HEAD | dict(kind="block", vocabulary=0, block=MARKOV),
    loss=SOFT | dict(block=dict(anchors=3, confidence_weight=1.0)),
  ),
  "peagle": dict(head_config=HEAD | dict(kind="peagle"), loss=SOFT),
}
JOINT = dict(
  model=dict(vocab_size=28, num_layers=2, **SHAPE),
  head_config=HEAD | dict(vocabulary=0),
  loss=dict(divergence="cross_entropy"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TRAINED, "joint"])
def test_two_processes_train_what_one_trains(tmp_path, kind):
  target = write_letters(tmp_path / "target")
  (tmp_path / "text").write_text("the cat sat on a mat " * 30)
  text = str(tmp_path / "text")
  shared = dict(data=text, held_out=text, options=OPTIONS, decoding=DECODING)
  if kind == "joint":
    entries = shared | JOINT | dict(tokenizer=str(target))
  else:
    entries = shared | TRAINED[kind] | dict(target=str(target))
  config = write_config(tmp_path / "config.py", **entries)
  programs.run("train", config, f"--folder={tmp_path / 'alone'}")
  folder = tmp_path / "run"
  run_pair(
    lambda i: [config, "--mesh=data:2", f"--folder={folder}"],
    devices=1,
    program="train",
  )
  for ours, theirs in zip(log(folder), log(tmp_path / "alone"), strict=True):
    for name in {*ours} - {"kind"}:
      np.testing.assert_allclose(
        ours[name], theirs[name], rtol=1e-5, atol=1e-5, err_msg=name
      )
  files = [
    sorted(str(x.relative_to(y)) for x in y.glob("[bl]*"))
    for y in (folder, tmp_path / "alone")
  ]
  assert files[0] == files[1] != []


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
