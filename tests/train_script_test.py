"""Corpus, tokenizer, target, draft, conversion: one script after another."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from specdec import checkpoints

ROOT = pathlib.Path(__file__).parents[1]
MODEL = dict(
  vocab_size=300,
  num_layers=1,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tied=True,
)
OPTIONS = dict(
  steps=20,
  batch=4,
  sequence=16,
  warmup=2,
  log_every=1,
  eval_every=10,
  save_every=5,
  eval_sequences=4,
)

DECODING = dict(k=2, prompts=4, length=8, new_tokens=8, temperature=0.0)


def start(script, *arguments, **options):
  command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  return subprocess.Popen(
    command,
    env=environment,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    **options,
  )


def call(script, *arguments):
  process = start(script, *arguments)
  said, _ = process.communicate(timeout=300)
  return process.returncode, said


def must(script, *arguments):
  code, said = call(script, *arguments)
  assert code == 0, said
  return said


def write_config(path, **entries):
  path.write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    f"  return config_dict.ConfigDict({entries!r})\n"
  )
  return f"--config={path}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with text, a tokenizer and the config of a target."""
  folder = tmp_path_factory.mktemp("place")
  (folder / "text").mkdir()
  for name in "abc":
    lines = [f"def {name}{i}(x):\n  return x + {i % 7}\n\n" for i in range(150)]
    (folder / "text" / f"{name}.py").write_text("".join(lines))
  said = must(
    "train_tokenizer.py",
    f"--data={folder / 'text'}",
    "--vocab_size=300",
    f"--output={folder / 'tokenizer'}",
  )
  assert "300 tokens" in said
  return folder


def entries(place, **changes):
  shared = dict(
    tokenizer=str(place / "tokenizer"),
    data=str(place / "text"),
    held_out=str(place / "text" / "c.py"),
    model=MODEL,
    options=OPTIONS,
  )
  return shared | changes


@pytest.fixture(scope="module")
def target(place):
  config = write_config(place / "target.py", **entries(place))
  said = must("train.py", config, f"--folder={place / 'target'}")
  assert "step 20: held-out" in said
  return place / "target" / "best"


def test_distils_a_draft_that_generate_can_use(place, target):
  config = write_config(
    place / "draft.py",
    **entries(
      place,
      target=str(target),
      loss="forward_kl",
      samples=dict(count=40, prompt=4, temperature=1.0),
      decoding=DECODING,
    ),
  )
  said = must("train.py", config, f"--folder={place / 'draft'}")
  assert "sampling" in said and "tokens_per_pass" in said
  lines = (place / "draft" / "metrics.jsonl").read_text().splitlines()
  decoded = [json.loads(x) for x in lines if '"decoding"' in x]
  assert [x["step"] for x in decoded] == [10, 20]
  said = must(
    "generate.py",
    f"--target={target}",
    f"--draft={place / 'draft' / 'last'}",
    "--prompt=def a1(x):",
    "--max_new_tokens=12",
    "--compilation_cache=",
  )
  assert re.search(r"same text as plain +yes", said)


def test_converts_there_and_back(place, target):
  must(
    "convert.py",
    f"--source={target}",
    f"--output={place / 'orbax'}",
    "--layout=orbax",
  )
  must(
    "convert.py", f"--source={place / 'orbax'}", f"--output={place / 'back'}"
  )
  first, last = (checkpoints.load(x) for x in (target, place / "back"))
  assert first.config == last.config
  jax.tree.map(np.testing.assert_array_equal, first.params, last.params)
  assert first.tokenizer.tokens == last.tokenizer.tokens
  assert first.eos_ids == last.eos_ids == (0,)
  said = must(
    "convert.py",
    f"--source={target}",
    f"--output={place / 'half'}",
    "--dtype=float16",
  )
  assert "M parameters" in said
  half = checkpoints.load(place / "half")
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a.astype(np.float16), b),
    first.params,
    half.params,
  )
  code, said = call(
    "convert.py", f"--source={target}", f"--output={place / 'half'}"
  )
  assert code == 1 and "is not empty" in said


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (dict(data="{place}/absent"), "does not exist"),
    (dict(options=OPTIONS | dict(sequence=99999)), "one sequence takes 100000"),
    (dict(speed="high"), "the config sets speed; accepted: tokenizer, "),
    (dict(model=MODEL | dict(num_layers=10**9)), "num_layers = 1,000,000,000"),
    (
      dict(target="{place}/other", loss="forward_kl", decoding=DECODING),
      "different vocabularies: token ",
    ),
    (dict(loss="total_variation"), "'total_variation' needs a target"),
    (dict(target="{place}/target/best"), "lacks decoding, loss"),
    (
      dict(start="{place}/target/best", model=MODEL | dict(width=32)),
      "width: 16",
    ),
    (dict(model=MODEL | dict(dtype="bfloat16")), "trained in float32"),
  ],
)
def test_refuses_before_it_begins(place, target, changes, complaint):
  if "other" in str(changes):
    _other_words(place, target)
  changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
  config = write_config(place / "bad.py", **entries(place, **changes))
  code, said = call("train.py", config, f"--folder={place / 'bad'}")
  assert code == 1 and complaint in said, said
  assert not (place / "bad").exists()


def _other_words(place, target):
  """The target again, with two tokens of its vocabulary exchanged."""
  model = checkpoints.load(target)
  checkpoints.save_safetensors(place / "other", model.params, model.config)
  model.tokenizer.save(place / "other")
  path = place / "other" / "tokenizer.json"
  content = json.loads(path.read_text())
  words = content["model"]["vocab"]
  words["a"], words["b"] = words["b"], words["a"]
  path.write_text(json.dumps(content))


def test_another_config_in_the_same_folder(place, target):
  changed = entries(place, options=OPTIONS | dict(learning_rate=0.5))
  config = write_config(place / "changed.py", **changed)
  code, said = call("train.py", config, f"--folder={place / 'target'}")
  assert code == 1 and "options.learning_rate: 0.001 -> 0.5" in said


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_weights(place, target):
  steps = OPTIONS | dict(steps=60, save_every=7)
  config = write_config(place / "long.py", **entries(place, options=steps))
  must("train.py", config, f"--folder={place / 'whole'}")
  folder = place / "killed"
  for least in (10, 25):
    process = start("train.py", config, f"--folder={folder}")
    while True:
      time.sleep(0.02)
      path = folder / "metrics.jsonl"
      if path.is_file() and len(path.read_text().splitlines()) >= least:
        process.send_signal(signal.SIGKILL)
        break
      assert process.poll() is None
    process.communicate()
  must("train.py", config, f"--folder={folder}")
  curves = [
    (place / name / "metrics.jsonl").read_text() for name in ("whole", "killed")
  ]
  assert curves[0] == curves[1]
  for name in ("best", "last"):
    first, last = (
      (place / run / name / "model.safetensors").read_bytes()
      for run in ("whole", "killed")
    )
    assert first == last
